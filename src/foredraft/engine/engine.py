"""The engine: requests in, token events out, one step at a time. There is one kind of step (step.py)."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial

import torch

from foredraft.batch import pack
from foredraft.config import ModelConfig
from foredraft.constraint import Constraint
from foredraft.engine.chunks import ChunkLimit
from foredraft.engine.detokenizer import Decodes, Detokenizer
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.speculation import Speculation
from foredraft.engine.stats import EngineStats
from foredraft.engine.step import Stepped, step
from foredraft.engine.stop_strings import StopStrings
from foredraft.engine.stops import find_stop
from foredraft.errors import InvalidParameter, InvalidPrompt
from foredraft.outputs import CompletionOutput, SpecMetrics, TokenEvent
from foredraft.params import SamplingParams
from foredraft.proposers.registry import Spec
from foredraft.runtime.kv import KVCache
from foredraft.runtime.runner import ForwardOutput, Runner
from foredraft.sampling.grammar import CompiledGrammar, Grammars
from foredraft.sampling.min_tokens import MinTokens
from foredraft.sampling.noise import derived_seed, prompt_key
from foredraft.sampling.verify import verify
from foredraft.types import TARGET, Commit, Counters, Draft, FinishReason, Sequence, Stop, TokenLogprob, Verdict, Work

_RECENT_STEPS = 256  # whose times are kept for `stats`


@dataclass
class _Live:
    """What the engine remembers of a sequence beside the sequence itself."""

    detokenizer: Detokenizer
    is_followed: bool  # whether somebody wants an event for every token
    is_reported: bool  # whether every commit matters: it is followed, or its log probabilities are collected
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Engine:
    """Runs sequences to their end. Not thread-safe: one thread adds, steps and aborts (see AsyncEngine)."""

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        runner: Runner,
        scheduler: Scheduler,
        kv: KVCache,
        tokenizer: Decodes,
        eos_token_ids: frozenset[int],
        generation_defaults: Mapping[str, float],
        speculation: Speculation,
        chunk_limit: ChunkLimit,
        grammars: Grammars,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.runner = runner
        self.runs_ahead = runner.backend.runs_ahead
        self.scheduler = scheduler
        self.kv = kv
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.generation_defaults = generation_defaults
        self.speculation = speculation
        self.chunk_limit = chunk_limit
        self.grammars = grammars
        self.clock = clock
        self._step_times_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._num_steps = 0
        self._live: dict[int, _Live] = {}
        self._by_request: dict[str, list[Sequence]] = {}
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def wants_calibration(self) -> bool:
        """Whether requests wait for a controller, so that moments in which nothing runs should go into measuring."""
        return self.speculation.wants_calibration

    def calibrate_step(self) -> None:
        """One run of the calibration. A request that comes meanwhile waits for it, as for a chunk of a prompt."""
        self.speculation.calibrate_step(self.chunk_limit.max_chunk_s)

    def stats(self) -> EngineStats:
        pool, kv_bytes = self.scheduler.pool, self.config.kv_bytes(self.runner.backend.kv_dtype.itemsize)
        windows = pool.windows
        return EngineStats(
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            free_blocks=pool.num_free_blocks,
            num_blocks=pool.num_blocks,
            num_steps=self._num_steps,
            step_times_s=tuple(self._step_times_s),
            kv_bytes_per_token=kv_bytes.per_token,
            kv_bytes_per_window=kv_bytes.per_window,
            free_window_blocks=0 if windows is None else windows.num_available,
            num_window_blocks=0 if windows is None else windows.num_window_blocks,
            misfit_heads=tuple(self.speculation.head_fit.misfits),
        )

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        spec: Spec,
        is_followed: bool = True,
        priority: int = 0,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Queue a request. Whatever is wrong with it is said here, before it costs anybody anything. One that nobody
        follows has no events but the last of each sample, which carries the output. `grammar` is that of the params,
        compiled: a caller for whom others wait brings it along, because compiling takes time."""
        if request_id in self._by_request:
            raise InvalidParameter(f"The request id {request_id!r} is in use; choose another.")
        params = params.resolved(self.generation_defaults)
        max_tokens = self._admit(prompt, params)
        if grammar is None and params.grammar is not None:
            grammar = self.grammars.compile(params.grammar)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        num_lookahead_tokens = self.speculation.prepare(spec)
        key = prompt_key(prompt, params.acceptance)
        stops = StopStrings(tuple(params.stop or ()))
        now = self.clock()
        for sample in range(params.n):
            sequence = Sequence(
                id=self._next_id,
                request_id=request_id,
                sample=sample,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                params=params,
                seed=derived_seed(seed, sample),
                max_tokens=max_tokens,
                priority=priority,
                num_lookahead_tokens=num_lookahead_tokens,
                prompt_key=key,
                constraint=self._constraint(params, grammar),
                counters=Counters(arrival_time=now),
            )
            self._next_id += 1
            detokenizer = Detokenizer(self.tokenizer, prompt, stops, is_followed, params.min_tokens)
            self._live[sequence.id] = _Live(detokenizer, is_followed, is_followed or params.logprobs is not None)
            self.speculation.register(sequence, spec)
            self._by_request.setdefault(request_id, []).append(sequence)
            self.scheduler.add(sequence)

    def step(self) -> list[TokenEvent]:
        """One run of the target for everybody who is scheduled."""
        stepped = step(self.scheduler, self.speculation, self, self.chunk_limit, self.clock)
        self._count(stepped)
        self._num_steps += 1
        self._step_times_s.append(stepped.draft_s + stepped.verify_s)
        events: list[TokenEvent] = []
        for index, (commit, stop) in enumerate(zip(stepped.commits, stepped.stops, strict=True)):
            if commit.finish_reason is not None or self._live[commit.sequence.id].is_reported:
                events += self._events(commit, stop.stable, self.speculation.reasons(index))
        return events

    def start(self, works: list[Work]) -> Callable[[], tuple[list[Verdict], list[Stop]]]:
        """Begin to run the target (see step.Target)."""
        return partial(self._verdicts, works, self.runner.forward(pack(works, self.kv.block_size)))

    def _verdicts(self, works: list[Work], output: ForwardOutput) -> tuple[list[Verdict], list[Stop]]:
        """Apply the acceptance rules to a run, and find where texts end."""
        with torch.inference_mode():
            verdicts = verify(output.logits, works, self.runner.sampler(output))
            verdicts = self._with_target_argmax(output.logits, works, verdicts)
        return verdicts, self._stops(works, verdicts)

    def keep(self, works: Items[Work], verdicts: Items[Verdict], stops: Items[Stop]) -> None:
        """Make the cache hold what was accepted (see step.Target)."""
        self.kv.keep(works, verdicts, stops)

    def abort(self, request_id: str, error: str | None = None) -> list[TokenEvent]:
        """End a request wherever it is. Unknown and finished ones are ignored: a client may be late."""
        reason: FinishReason = "abort" if error is None else "error"
        events: list[TokenEvent] = []
        for sequence in list(self._by_request.get(request_id, ())):
            self.scheduler.abort(sequence, reason)
            events += self._events(Commit(sequence, (), (), (), reason, error=error), [])
        return events

    def is_live(self, request_id: str) -> bool:
        """Whether any sample of the request is still to be finished."""
        return request_id in self._by_request

    def num_uncomputed_prompt_tokens(self, request_id: str) -> int:
        """How much of a request's prompt is still to be computed; nothing once a token is written, or of one that has
        finished."""
        sequences = self._by_request.get(request_id, ())
        return min((max(0, each.num_prompt_tokens - each.num_computed_tokens) for each in sequences), default=0)

    def abort_all(self, failure: BaseException | None = None) -> list[TokenEvent]:
        """End everything. A step that failed as a whole can be blamed on nobody, and nobody may wait for ever: then all
        end with an error."""
        error = None
        if failure is not None:
            error = f"The engine failed while this request ran: {str(failure) or type(failure).__name__}."
        return [event for request_id in list(self._by_request) for event in self.abort(request_id, error)]

    def _admit(self, prompt: list[int], params: SamplingParams) -> int:
        """Check a request against this model; returns how many tokens it may write."""
        if not prompt:
            raise InvalidPrompt("The prompt is empty; give at least one token.")
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise InvalidPrompt(
                f"The prompt has {len(prompt)} tokens, but the context holds {self.max_model_len} including the "
                "answer; shorten it or raise max_model_len."
            )
        vocab = self.config.vocab_size
        if not all(isinstance(token, int) and 0 <= token < vocab for token in prompt):
            raise InvalidPrompt(f"The prompt has token ids that the model does not have; allowed are 0 to {vocab - 1}.")
        predicted = () if isinstance(params.prediction, str) else params.prediction or ()
        named = {
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids or (),
            "prediction": predicted,
        }
        for name, ids in named.items():
            if any(token >= vocab for token in ids):
                raise InvalidParameter(
                    f"{name} has token ids that the model does not have; allowed are 0 to {vocab - 1}."
                )
        max_tokens = min(params.max_tokens, room)
        if not self.scheduler.can_ever_fit(len(prompt) + max_tokens):
            raise InvalidPrompt(
                f"The request needs {len(prompt) + max_tokens} tokens of KV cache, but there are only "
                f"{self.kv.num_blocks * self.kv.block_size}; raise kv_cache_tokens, lower max_tokens or shorten the "
                "prompt."
            )
        return max_tokens

    def _constraint(self, params: SamplingParams, grammar: CompiledGrammar | None) -> Constraint | None:
        """What one sample of a request may write."""
        constraint = None if grammar is None else grammar.constraint(params.ignore_eos)
        if not params.min_tokens:
            return constraint
        ends = params.stop_token_set | (frozenset() if params.ignore_eos else self.eos_token_ids)
        return MinTokens(params.min_tokens, ends, self.config.vocab_size, constraint)

    def _with_target_argmax(self, logits: torch.Tensor, works: Items[Work], verdicts: list[Verdict]) -> list[Verdict]:
        """Add the target argmax after every draft node, where a proposer wants it."""
        if not self.speculation.any_wants_target_argmax:
            return verdicts
        row = 0
        for index, work in enumerate(works):
            row += work.num_logits
            if work.reaches_end and self.speculation.wants_target_argmax(work.sequence):
                target_argmax = logits[row - 1 - len(work.draft) : row].argmax(-1).tolist()
                verdicts[index] = verdicts[index]._replace(target_argmax=tuple(target_argmax))
        return verdicts

    def _stops(self, works: Items[Work], verdicts: list[Verdict]) -> list[Stop]:
        """Where every verdict is cut. A request whose text cannot be decoded gets another, and ends alone."""
        stops: list[Stop] = []
        live, eos_token_ids = self._live, self.eos_token_ids
        for index, work in enumerate(works):
            sequence = work.sequence
            try:
                detokenizer = live[sequence.id].detokenizer
                stop, stable = find_stop(sequence, verdicts[index].tokens, eos_token_ids, detokenizer)
                stops.append(Stop(stop.num_kept, stop.finish_reason, stop.stop_reason, stable))
            except Exception as error:
                verdicts[index] = Verdict(error=f"The text of this request could not be decoded: {error}")
                stops.append(Stop(0))
        return stops

    def _count(self, stepped: Stepped) -> None:
        """Every sequence waited for the run; only those that might get a draft waited for the proposers."""
        now, (works, commits, _, draft_time_s, verify_time_s) = self.clock(), stepped
        begun = now - verify_time_s - draft_time_s
        for index, (work, commit) in enumerate(zip(works, commits, strict=True)):
            reasons, draft_s = self.speculation.reasons(index), draft_time_s if work.num_lookahead_tokens else 0.0
            commit.sequence.counters.count_step(commit, reasons, begun, now, draft_s, verify_time_s)

    def _events(self, commit: Commit, stable: Items[int], reasons: tuple[str, ...] = ()) -> list[TokenEvent]:
        """A commit as events, one per token. The first one carries the draft and why it was made, the last one of a
        finished sequence its output."""
        sequence = commit.sequence
        live = self._live[sequence.id]
        if sequence.params.logprobs is not None:
            live.logprobs += [logprob for logprob in commit.logprobs if logprob is not None]
        if not live.is_followed and commit.finish_reason is None:
            return []
        request_id, sample, take = sequence.request_id, sequence.sample, live.detokenizer.take
        events: list[TokenEvent] = []
        draft = commit.draft if commit.draft.q is None else commit.draft.only(list(range(len(commit.draft))))
        step: tuple[Draft | None, tuple[int, ...], tuple[str, ...]] = draft, commit.accepted, reasons
        for token, origin, logprob, upto in zip(commit.tokens, commit.origins, commit.logprobs, stable, strict=True):
            events.append(TokenEvent(request_id, sample, token, take(upto), origin, logprob, None, None, *step))
            step = None, (), ()
        if commit.finish_reason is None:
            return events
        output = self._finish(commit)
        rest = live.detokenizer.take(len(output.text))
        last = events.pop() if events else TokenEvent(sequence.request_id, sequence.sample, None, "", TARGET)
        events.append(last._replace(text=last.text + rest, finish_reason=commit.finish_reason, output=output))
        return events if live.is_followed else events[-1:]

    def _finish(self, commit: Commit) -> CompletionOutput:
        sequence = commit.sequence
        assert commit.finish_reason is not None
        siblings = self._by_request[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request_id]
        live = self._live.pop(sequence.id)
        self.speculation.release([sequence.id])
        return CompletionOutput(
            index=sequence.sample,
            text=live.detokenizer.text,
            token_ids=sequence.output_token_ids,
            finish_reason=commit.finish_reason,
            stop_reason=commit.stop_reason,
            seed=sequence.seed,
            logprobs=live.logprobs if sequence.params.logprobs is not None else None,
            prompt_logprobs=sequence.prompt_logprobs if sequence.params.prompt_logprobs is not None else None,
            metrics=SpecMetrics.of(sequence),
            error=commit.error,
        )
