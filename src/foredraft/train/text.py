"""Text written by the target itself: answers to prompts of files, and to prompts that the model invents.

The work is cut into numbered chunks, each of which becomes one shard. A chunk depends on its number and the seed alone,
so that a folder that holds some of them is continued with the others.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path

from foredraft.errors import InvalidModel, InvalidPrompt
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.train.prompts import Excluded, read_prompts, usable_inventions
from foredraft.train.shards import Answer, num_answer_tokens, shard_file, write_shard

Progress = Callable[[int, float], None]  # answer tokens so far, seconds so far
_IsDone = Callable[[int], bool]  # whether so many answer tokens more are enough, or the time is over

_EMPTY_CHUNKS = 3  # so many in a row: this model writes nothing that could be used
_PLACE = "0123456789"  # stands for the user's turn where the template is cut
_INVENTED_TOKENS = 192  # the longest invented prompt
_SPARE_INVENTIONS = 1.15  # about 90 % are usable


@dataclass(frozen=True)
class TextPlan:
    """What text is to be written. Chunks answer prompts of the files until those are used up; all others invent their
    prompts. Every second answer is greedy."""

    files: tuple[Path, ...] = ()
    exclude: tuple[Path, ...] = ()
    seed: int = 0
    chunk_prompts: int = 256
    max_tokens: int = 256  # of an answer
    max_len: int = 2048  # of a sequence; longer prompts are left out
    temperature: float = 0.8  # of every other answer

    @cached_property
    def excluded(self) -> Excluded:
        return Excluded(self.exclude)

    @cached_property
    def prompts(self) -> list[str]:
        """Those of the files that no evaluation has, shuffled."""
        prompts = [prompt for prompt in read_prompts(self.files) if prompt not in self.excluded]
        random.Random(self.seed).shuffle(prompts)
        return prompts

    def prompts_of(self, chunk: int) -> Sequence[str]:
        """The prompts of files that a chunk answers; none: it invents its own."""
        first = chunk * self.chunk_prompts
        return self.prompts[first : first + self.chunk_prompts]

    def prompts_again(self, chunk: int) -> Sequence[str]:
        """What a chunk answers when the model invents nothing usable."""
        return random.Random(f"{self.seed} {chunk}").sample(self.prompts, min(self.chunk_prompts, len(self.prompts)))


class TextWriter:
    """Writes chunks with one engine. All prompts of a chunk wait in it at once, so a large batch serves best."""

    def __init__(self, plan: TextPlan, llm: LLM, target_name: str, digest: str) -> None:
        self._plan, self._llm = plan, llm
        self._provenance = {
            "target_name": target_name,
            "target_digest": digest,
            "prompts": ", ".join(file.name for file in plan.files),
            "excluded": ", ".join(file.name for file in plan.exclude),
            "temperature": str(plan.temperature),
            "max_tokens": str(plan.max_tokens),
            "seed": str(plan.seed),
        }

    def write(self, folder: Path, tokens: int, seconds: float | None = None, progress: Progress | None = None) -> int:
        """Continues the text of a folder until it has `tokens` answer tokens or `seconds` are over; returns how many it
        has. The last shard has what is finished by then."""
        have, started, empty = num_answer_tokens(folder), time.monotonic(), 0
        folder.mkdir(parents=True, exist_ok=True)

        def is_done(more: int) -> bool:
            elapsed = time.monotonic() - started
            if progress is not None:
                progress(have + more, elapsed)
            return have + more >= tokens or (seconds is not None and elapsed > seconds)

        for chunk in count():
            if is_done(0):
                return have
            if not shard_file(folder, chunk).exists():
                written = self._write_chunk(folder, chunk, is_done)
                have, empty = have + written, 0 if written else empty + 1
                if empty == _EMPTY_CHUNKS and not is_done(0):
                    name = self._provenance["target_name"]
                    raise InvalidModel(f"{name} writes nothing that could be trained on; give a file of prompts.")
        raise AssertionError("chunks have no end")

    def _write_chunk(self, folder: Path, chunk: int, is_done: _IsDone) -> int:
        """Writes a chunk's shard, if it has any answer; returns the number of its answer tokens."""
        prompts = self._plan.prompts_of(chunk)
        source = "files"
        if not prompts:
            prompts, source = self._invent(chunk, is_done), "invented"
        if not prompts:
            prompts, source = self._plan.prompts_again(chunk), "files again"
        answers, tokens = list[Answer](), 0
        with closing(self._answers(prompts, chunk)) as finished:
            for answer in finished:
                answers.append(answer)
                tokens += len(answer.answer)
                if is_done(tokens):
                    break
        if answers:
            provenance = {**self._provenance, "source": source, "chunk": str(chunk)}
            write_shard(shard_file(folder, chunk), answers, self._llm.model_config.vocab_size, provenance)
        return tokens

    def _invent(self, chunk: int, is_done: _IsDone) -> list[str]:
        plan, prefix = self._plan, self._user_prefix()
        count = int(plan.chunk_prompts * _SPARE_INVENTIONS)
        max_tokens = min(_INVENTED_TOKENS, self._max_len // 2)
        params = [
            SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=_seed(plan.seed, chunk, index, 1))
            for index in range(count)
        ]
        texts: list[str] = []
        with closing(self._finished([prefix] * count, params)) as finished:
            for _, ids, reason in finished:
                if reason == "stop" or not self._has_chat:
                    texts.append(self._llm.tokenizer.decode(ids))
                if is_done(0):
                    break
        return usable_inventions(texts, plan.excluded)[: plan.chunk_prompts]

    def _answers(self, prompts: Sequence[str], chunk: int) -> Generator[Answer]:
        plan = self._plan
        encoded = [self._encode(prompt) for prompt in prompts]
        encoded = [ids for ids in encoded if 0 < len(ids) <= self._max_len - min(plan.max_tokens, self._max_len // 2)]
        params = [
            SamplingParams(
                max_tokens=plan.max_tokens,
                temperature=plan.temperature * (index % 2),
                seed=_seed(plan.seed, chunk, index, 0),
            )
            for index in range(len(encoded))
        ]
        for index, ids, _ in self._finished(encoded, params):
            yield Answer(encoded[index], ids, greedy=index % 2 == 0)

    def _finished(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> Generator[tuple[int, list[int], str | None]]:
        """Index, tokens and finish reason of every request as it finishes. Whoever closes it ends the others."""
        for index, output in self._llm.as_finished(prompts, params, spec="off") if prompts else ():
            if output.finish_reason in ("stop", "length"):
                yield index, list(output.token_ids), output.finish_reason

    def _encode(self, prompt: str) -> list[int]:
        if self._has_chat:
            return self._llm.encode([{"role": "user", "content": prompt}])
        return self._llm.encode(prompt)

    @cached_property
    def _has_chat(self) -> bool:
        try:
            self._llm.tokenizer.render_chat([{"role": "user", "content": _PLACE}])
        except InvalidPrompt:
            return False
        return True

    def _user_prefix(self) -> list[int]:
        """The ids of a conversation up to where the user speaks. A model without a chat template begins any text."""
        tokenizer = self._llm.tokenizer
        if self._has_chat:
            text = tokenizer.render_chat([{"role": "user", "content": _PLACE}], add_generation_prompt=False)
            return tokenizer.encode(text[: text.index(_PLACE)], add_special_tokens=False)
        return [next(iter(tokenizer.eos_token_ids), 0) if tokenizer.bos_token_id is None else tokenizer.bos_token_id]

    @property
    def _max_len(self) -> int:
        return min(self._plan.max_len, self._llm.max_model_len)


def _seed(seed: int, chunk: int, index: int, stage: int) -> int:
    return random.Random(f"{seed} {chunk} {index} {stage}").getrandbits(31)
