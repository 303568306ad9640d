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
_IsDone = Callable[[], bool]  # whether there is enough text, or the time is over

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


class _Chunk:
    """A chunk that is being written: what has come of it, and what is to come."""

    def __init__(self, number: int, source: str, answers: Generator[Answer]) -> None:
        self.number, self.source = number, source
        self.answers: list[Answer] = []
        self.num_tokens = 0  # of the answers
        self._to_come = answers

    def advance(self) -> bool:
        """Wait for one answer more; False: there is none."""
        answer = next(self._to_come, None)
        if answer is None:
            return False
        self.answers.append(answer)
        self.num_tokens += len(answer.answer)
        return True

    def close(self) -> None:
        """End what is still to come."""
        self._to_come.close()


class TextWriter:
    """Writes chunks with one engine. All prompts of a chunk wait in it at once, so a large batch serves best. The next
    chunk begins when no prompt waits any more: so the batch does not run empty."""

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
        has. The last shards have what is finished by then."""
        written, started, empty = num_answer_tokens(folder), time.monotonic(), 0
        folder.mkdir(parents=True, exist_ok=True)
        missing = (chunk for chunk in count() if not shard_file(folder, chunk).exists())
        live: list[_Chunk] = []

        def is_done() -> bool:
            have, elapsed = written + sum(chunk.num_tokens for chunk in live), time.monotonic() - started
            if progress is not None:
                progress(have, elapsed)
            return have >= tokens or (seconds is not None and elapsed > seconds)

        try:
            while not is_done():
                if len(live) < 2 and not self._llm.engine.scheduler.waiting:
                    live.append(self._begin(next(missing), is_done))
                    live[-1].advance()  # queues its prompts; answers of the chunk before it are kept until asked for
                elif not live[0].advance():
                    chunk = live.pop(0)
                    written += self._save(folder, chunk)
                    empty = 0 if chunk.answers else empty + 1
                    if empty == _EMPTY_CHUNKS and not is_done():
                        name = self._provenance["target_name"]
                        raise InvalidModel(f"{name} writes nothing that could be trained on; give a file of prompts.")
        finally:
            for chunk in live:
                chunk.close()
        return written + sum(self._save(folder, chunk) for chunk in live)

    def _begin(self, number: int, is_done: _IsDone) -> _Chunk:
        """A chunk with its prompts, invented ones if the files have no more."""
        prompts, source = self._plan.prompts_of(number), "files"
        if not prompts:
            prompts, source = self._invent(number, is_done), "invented"
        if not prompts:
            prompts, source = self._plan.prompts_again(number), "files again"
        return _Chunk(number, source, self._answers(prompts, number))

    def _save(self, folder: Path, chunk: _Chunk) -> int:
        """Writes a chunk's shard, if it has any answer; returns the number of its answer tokens."""
        if chunk.answers:
            provenance = {**self._provenance, "source": chunk.source, "chunk": str(chunk.number)}
            write_shard(shard_file(folder, chunk.number), chunk.answers, self._llm.model_config.vocab_size, provenance)
        return chunk.num_tokens

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
                if is_done():
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
