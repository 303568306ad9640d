"""A whole training run, as `foredraft train` makes it: text, draft vocabulary, students, loop, heads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path

import torch

from foredraft.backends.choose import choose_device
from foredraft.engine.capacity import spare_bytes
from foredraft.engine.loading import Progress as LoadProgress
from foredraft.errors import InvalidParameter
from foredraft.heads.base import CONFIG_FILE
from foredraft.heads.files import check_out, target_digest
from foredraft.llm import LLM
from foredraft.models.catalog import open_checkpoint, resolve
from foredraft.reports.facts import describe_versions
from foredraft.train.batches import Batches
from foredraft.train.evaluate import Evaluation
from foredraft.train.features import FrozenTarget
from foredraft.train.kept_features import affordable_rows
from foredraft.train.kinds import KindChoice, build_student
from foredraft.train.loop import HELD_OUT, Goal, Report, Training
from foredraft.train.shards import Text, num_answer_tokens, read_text
from foredraft.train.state import saved_vocabulary
from foredraft.train.student import Facts, Student
from foredraft.train.target_batch import Teacher
from foredraft.train.text import Progress, TextPlan, TextWriter
from foredraft.train.vocabulary import DRAFT_VOCAB_SIZE, coverage, draft_vocabulary, frequencies

_WAVES = 8  # of a batch in a chunk
TEXT_SHARE = 0.4  # of the time, at most, for a run that writes its own text


Loading = Callable[[], AbstractContextManager[LoadProgress | None]]  # around whatever fetches or loads the model


@dataclass(frozen=True)
class TrainOptions:
    """What to train, on what, and how long. None means: chosen by the device."""

    model: str
    out: Path
    kinds: tuple[KindChoice, ...] = ()
    text: Path | None = None  # None: a folder inside `out`
    plan: TextPlan = field(default_factory=TextPlan)
    tokens: int | None = None  # answer tokens of the text
    steps: int | None = None
    minutes: float | None = None  # of text and training
    batch_tokens: int | None = None
    text_batch: int | None = None
    vocab: int = DRAFT_VOCAB_SIZE
    rate: float = 1.0
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"  # of the engine that writes the text
    threads: int | None = None

    @property
    def text_folder(self) -> Path:
        return self.out / "text" if self.text is None else self.text

    def folder_of(self, kind: KindChoice) -> Path:
        """One kind fills `out` itself, several have a folder each."""
        return self.out if len(self.kinds) == 1 else self.out / kind.folder


@dataclass(frozen=True)
class DeviceDefaults:
    tokens: int
    batch_tokens: int
    text_batch: int
    dtype: str


_DEFAULTS = {
    "cuda": DeviceDefaults(tokens=8_000_000, batch_tokens=32_768, text_batch=256, dtype="bfloat16"),
    "cpu": DeviceDefaults(tokens=100_000, batch_tokens=2_048, text_batch=32, dtype="auto"),
}


class TrainingRun:
    """The parts of a run, in the order in which they are used."""

    def __init__(self, options: TrainOptions, loading: Loading = nullcontext) -> None:
        self.options = options
        self._loading = loading
        for kind in options.kinds:
            check_out(options.folder_of(kind))
        self.device = choose_device(options.device)
        self._defaults = _DEFAULTS["cuda" if self.device.type == "cuda" else "cpu"]
        self.tokens = options.tokens or self._defaults.tokens  # of answers, in the text
        with loading() as shown:
            self._path = resolve(options.model, None if shown is None else partial(shown, "fetch"))
        self._checkpoint = open_checkpoint(self._path)
        self._digest = target_digest(self._checkpoint)
        self._name = self._path.stem if self._path.is_file() else self._path.name
        if options.threads is not None:
            torch.set_num_threads(options.threads)

    def write_text(self, seconds: float | None, progress: Progress | None = None) -> int:
        """Continues the text up to the wanted number of answer tokens; returns how many there are."""
        options, defaults = self.options, self._defaults
        batch = options.text_batch or defaults.text_batch
        if (have := num_answer_tokens(options.text_folder)) >= self.tokens:
            return have
        plan = replace(options.plan, chunk_prompts=_WAVES * batch)
        with self._loading() as shown:
            llm = LLM(
                str(self._path),
                spec="off",
                dtype=defaults.dtype if options.dtype == "auto" else options.dtype,
                device=options.device,
                exact=False,
                max_num_seqs=batch,
                max_num_batched_tokens=max(8192, batch),
                refill=max(1, batch // 4),
                max_chunk_s=inf,
                kv_cache_tokens=batch * (plan.max_len // 2),
                prefix_caching=False,
                threads=options.threads,
                progress=shown,
            )
        with closing(llm):
            writer = TextWriter(plan, llm, self._name, self._digest)
            return writer.write(options.text_folder, self.tokens, seconds, progress)

    def train(self, report: Callable[[Report], None], spent_s: float = 0.0) -> dict[str, Evaluation]:
        """Trains all kinds on the text that is there and writes their folders. `spent_s` of the run's time are gone."""
        options = self.options
        if options.steps is None and options.minutes is None:
            raise InvalidParameter("Say how long to train: --minutes or --steps.")
        text = read_text(options.text_folder, self._digest)
        batch_tokens = options.batch_tokens or self._defaults.batch_tokens
        with self._loading() as shown:
            told = None if shown is None else partial(shown, "load")
            target = FrozenTarget(self._checkpoint, self.device, int(text.lengths.max()) + 64, progress=told)
        state_folder = options.out / "training"
        folders = [options.folder_of(kind) for kind in options.kinds]
        counts = frequencies(text, target.config.vocab_size)
        vocabulary = saved_vocabulary([state_folder, *folders])
        if vocabulary is None:
            vocabulary = draft_vocabulary(counts, options.vocab)
        tokenizer = self._checkpoint.tokenizer()
        students: list[Student] = [
            build_student(
                kind, target, vocabulary, counts[vocabulary], tokenizer, self._name, self._digest, options.seed
            )
            for kind in options.kinds
        ]
        taps = frozenset().union(*(student.taps for student in students))
        batches = Batches(text, batch_tokens, options.seed)
        affordable = affordable_rows(target, taps, spare_bytes(self.device))
        teacher = Teacher(target, vocabulary, taps, min(affordable, int(text.lengths.sum())))
        training = Training(students, teacher, batches, state_folder, options.seed)
        if not training.resume():
            for student, folder in zip(students, folders):
                if (folder / CONFIG_FILE).exists():  # weights without a state: go on from them
                    student.load(folder)
        seconds = None if options.minutes is None else max(1.0, 60 * options.minutes - spent_s)
        provenance = self._provenance(text, coverage(counts, vocabulary))

        def saved() -> None:
            training.write(folders, provenance, HELD_OUT)

        training.run(Goal(options.steps, seconds, options.rate), report, saved)
        return training.write(folders, provenance)

    def _provenance(self, text: Text, covered: float) -> Facts:
        plan = self.options.plan
        return {
            "foredraft": describe_versions().get("foredraft", "unknown"),
            "torch": str(torch.__version__),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "text": f"written by the target: half of the answers greedy, half at temperature {plan.temperature}",
            "text_sequences": len(text),
            "text_answer_tokens": text.num_answer_tokens,
            "vocabulary_coverage": round(covered, 4),
        }
