"""The engine for servers: one thread steps, any number of asyncio tasks generate, read and abort."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar, overload

from foredraft.engine.engine import Engine
from foredraft.engine.stats import EngineStats
from foredraft.engine.stream import Channel, Stream
from foredraft.errors import InvalidParameter, InvalidPrompt, Overloaded
from foredraft.outputs import TokenEvent
from foredraft.params import SamplingParams
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, Spec, parse_spec
from foredraft.sampling.grammar import CompiledGrammar

log = logging.getLogger(__name__)

Action = Callable[[], Any]
_Batch = list[tuple[Channel, TokenEvent]]
_T = TypeVar("_T")
P = TypeVar("P")  # a prompt, as `encode` takes it

_MOST_COMMANDS = 32  # between two steps: running requests do not wait for a crowd of new ones
_GATHER_S = 0.02  # requests that come together begin together, if the last of them is admitted within this time


def token_ids(prompt: list[int]) -> list[int]:
    """The `encode` of an engine that is only given token ids."""
    if not isinstance(prompt, list):
        raise InvalidPrompt(f"A prompt must be a list of token ids, not {type(prompt).__name__}.")
    return prompt


class AsyncEngine(Generic[P]):
    """Owns an Engine and the only thread that touches it. Commands go in through a queue and run between steps.

    `encode` turns prompts into token ids, off the event loop and off the engine thread: LLM.encode takes texts and
    conversations too. `max_waiting` is how many sequences may wait beyond the `max_num_seqs` that may run; None sets no
    limit.
    """

    @overload
    def __init__(self: AsyncEngine[list[int]], engine: Engine, *, max_waiting: int | None = None) -> None: ...

    @overload
    def __init__(self, engine: Engine, encode: Callable[[P], list[int]], max_waiting: int | None = None) -> None: ...

    def __init__(
        self, engine: Engine, encode: Callable[[Any], list[int]] = token_ids, max_waiting: int | None = None
    ) -> None:
        if max_waiting is not None and (type(max_waiting) is not int or max_waiting < 0):
            raise InvalidParameter(
                f"max_waiting={max_waiting!r} must be a whole number of at least 0, or None for no limit."
            )
        self._engine = engine
        self._encode = encode
        self._max_waiting = max_waiting
        self._commands: queue.SimpleQueue[tuple[Future[Any], Action] | None] = queue.SimpleQueue()  # None: the last
        self._gate = threading.RLock()  # a stream that is collected may enter again
        self._closed = False  # under the gate: nothing is queued behind the last command
        self._channels: dict[str, Channel] = {}  # of unfinished requests; changed under the gate
        self._num_unfinished = 0  # their samples
        self._request_ids = count()
        self._admissions: set[asyncio.Task[None]] = set()  # asyncio itself holds tasks weakly
        self._builder = ThreadPoolExecutor(1, "foredraft-builder")  # models are loaded one by one
        self._compiler = ThreadPoolExecutor(1, "foredraft-grammar")  # and grammars are compiled one by one
        engine.grammars.prepare()  # stops all threads for a moment: nobody waits yet
        self._thread = threading.Thread(target=self._loop, name="foredraft-engine", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        """Whether it answers, and the load at this moment."""
        if not self.is_alive:
            return "<AsyncEngine, closed>"
        stats, waiting = self.stats(), "any number" if self._max_waiting is None else self._max_waiting
        return (
            f"<AsyncEngine: {stats.running} of {self._engine.scheduler.max_num_seqs} sequences run, "
            f"{stats.waiting} of {waiting} wait, max_model_len={self._engine.max_model_len}>"
        )

    def generate(
        self,
        prompt: P,
        params: SamplingParams | None = None,
        spec: Spec | str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        arrived: asyncio.Event | None = None,
    ) -> Stream:
        """Begin a request; `async for event in engine.generate(...)` reads it.

        Raises Overloaded when too many wait, before the prompt is looked at, and InvalidSpec when `spec` cannot be
        parsed. What is wrong with the prompt, the parameters or the proposers is raised by the first event, and by
        `await stream.admitted()`. Without a spec nothing is drafted. Of those that wait, the ones with the lowest
        `priority` run first. Requests may share `arrived`: it is set whenever there may be something to read of one.
        """
        loop = asyncio.get_running_loop()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidParameter(f"params must be a SamplingParams, not {type(params).__name__}.")
        if not isinstance(spec, Spec):
            spec = Spec() if spec is None else parse_spec(spec)
        with self._gate:
            if self._closed:
                raise RuntimeError("The engine is closed.")
            self.check_load(params.n)
            if request_id is None:
                request_id = next(name for number in self._request_ids if (name := f"{number}") not in self._channels)
            if request_id in self._channels:
                raise InvalidParameter(f"The request id {request_id!r} is in use; choose another.")
            channel = Channel(loop, request_id, params, priority, arrived or asyncio.Event(), unfinished=params.n)
            self._channels[request_id] = channel
            self._num_unfinished += params.n
        task = loop.create_task(self._admit(channel, prompt, spec))
        self._admissions.add(task)
        task.add_done_callback(self._admissions.discard)
        return Stream(channel, self._leave)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream closes with finish_reason "abort". Unknown ids are ignored."""
        channel = self._channels.get(request_id)
        if channel is not None:
            channel.is_aborted = True
        await asyncio.shield(self._call(partial(self._abort, channel)))

    def stats(self) -> EngineStats:
        """The load at this moment, and what recent steps took. Requests that are not admitted yet are waiting too."""
        stats = self._engine.stats()
        return replace(stats, waiting=max(0, self._num_unfinished - stats.running))

    @property
    def is_alive(self) -> bool:
        """Whether requests can still be answered."""
        return not self._closed and self._thread.is_alive()

    async def close(self) -> None:
        """Abort everything and stop the thread. A proposer that is being built is not waited for."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        for channel in list(self._channels.values()):  # none of these was admitted, and the thread is gone
            self._refuse(channel, RuntimeError("The engine is closed."))
        self._builder.shutdown(wait=False)
        self._compiler.shutdown(wait=False)

    def check_load(self, num_samples: int) -> None:
        """Raises Overloaded while there is no room for so many answers, and InvalidParameter where there never is."""
        if self._max_waiting is None:
            return
        may_run = self._engine.scheduler.max_num_seqs
        limit = f"at most {may_run} run (max_num_seqs) and {self._max_waiting} more wait (max_waiting)"
        if num_samples > may_run + self._max_waiting:
            raise InvalidParameter(f"n asks for {num_samples} sequences in all, but {limit}; lower n.")
        if self._num_unfinished + num_samples > may_run + self._max_waiting:
            raise Overloaded(
                f"{self._num_unfinished} sequences run or wait and this request has {num_samples}, but {limit}; "
                "try again later."
            )

    async def _admit(self, channel: Channel, prompt: P, spec: Spec) -> None:
        """Tokenise a prompt, compile its grammar, build the proposers that are missing, and have the engine thread add
        the request."""
        built: dict[str, tuple[ProposerChoice, Proposer]] = {}
        try:
            channel.prompt_token_ids = await asyncio.to_thread(self._encode, prompt)
            grammar = await self._compiled(channel)
            add = partial(self._add, channel, spec, built, grammar)
            while missing := await self._call(add):
                for choice in missing:
                    make = partial(self._engine.speculation.assignments.make_proposer, choice)
                    if (proposer := await self._made(self._builder, channel, make)) is not None:
                        built[str(choice)] = choice, proposer
            channel.decide()
        except Exception as error:
            self._refuse(channel, error)
        except BaseException:  # the event loop ends; the command may have run all the same
            channel.leave()
            channel.wake()
            self._leave(channel)
            raise
        finally:
            for _, proposer in built.values():
                proposer.close()

    async def _compiled(self, channel: Channel) -> CompiledGrammar | None:
        """The grammar of a request; one that others use too is at hand, whatever is being compiled."""
        wanted, grammars = channel.params.grammar, self._engine.grammars
        if wanted is None:
            return None
        return grammars.find(wanted) or await self._made(self._compiler, channel, partial(grammars.compile, wanted))

    async def _made(self, thread: Executor, channel: Channel, make: Callable[[], _T]) -> _T | None:
        """What a request needs, made on that thread; None if the request needs nothing any more."""
        return await channel.loop.run_in_executor(
            thread, lambda: None if self._closed or channel.is_left or channel.is_aborted else make()
        )

    def _add(
        self,
        channel: Channel,
        spec: Spec,
        built: dict[str, tuple[ProposerChoice, Proposer]],
        grammar: CompiledGrammar | None,
    ) -> list[ProposerChoice]:
        """On the engine thread: install what was built and add the request, unless proposers are missing still."""
        if channel.is_left or not self._is_unfinished(channel):
            return []
        params = channel.params
        if channel.is_aborted:  # it ends at once and needs neither proposers nor a grammar
            spec, params, grammar = Spec(), replace(params, grammar=None), None
        assignments = self._engine.speculation.assignments
        while built:
            assignments.install(*built.popitem()[1])
        if missing := assignments.missing(spec):
            return missing
        self._engine.add(
            channel.request_id,
            channel.prompt_token_ids,
            params,
            spec,
            priority=channel.priority,
            grammar=grammar,
        )
        if channel.is_aborted:
            self._deliver(self._engine.abort(channel.request_id))
        return []

    def _abort(self, channel: Channel | None) -> None:
        """On the engine thread: end a request. One whose grammar or proposers are being made is added without them: its
        readers do not wait for those."""
        if channel is None or not self._is_unfinished(channel):
            return
        if self._engine.is_live(channel.request_id):
            self._deliver(self._engine.abort(channel.request_id))
        elif channel.prompt_token_ids:
            try:
                self._add(channel, Spec(), {}, None)
            except Exception as error:
                self._refuse(channel, error)

    def _leave(self, channel: Channel) -> None:
        """Abort a request that nobody reads. Called from anywhere, even while memory is collected."""

        def end() -> None:
            if self._is_unfinished(channel):
                self._engine.abort(channel.request_id)
                self._forget(channel)

        future: Future[None] = Future()
        future.add_done_callback(_log_failure)  # nobody waits for it
        with self._gate:
            if not self._closed:
                self._commands.put((future, end))

    def _refuse(self, channel: Channel, error: Exception) -> None:
        """Tell the readers of a request that was not admitted. Called from any thread."""
        self._forget(channel)
        with suppress(RuntimeError):  # the event loop of these readers is closed
            channel.loop.call_soon_threadsafe(channel.decide, error)

    def _is_unfinished(self, channel: Channel) -> bool:
        """Else it has ended, and its id may be another's."""
        return self._channels.get(channel.request_id) is channel

    def _forget(self, channel: Channel) -> None:
        with self._gate:
            if self._is_unfinished(channel):
                del self._channels[channel.request_id]
                self._num_unfinished -= channel.params.n

    def _call(self, action: Callable[[], _T]) -> asyncio.Future[_T]:
        """Have the engine thread do something; cancelling the future withdraws what has not begun."""
        future: Future[_T] = Future()
        with self._gate:
            if self._closed:
                raise RuntimeError("The engine is closed.")
            self._commands.put((future, action))
        return asyncio.wrap_future(future)

    def _loop(self) -> None:
        while self._run_commands():
            if self._engine.has_work:
                self._step()
            elif self._engine.wants_calibration:
                self._engine.calibrate_step()

    def _run_commands(self) -> bool:
        """Run some of the commands that are queued, and wait for one where there is nothing else to do; returns whether
        to go on."""
        gather_until = time.monotonic() + _GATHER_S
        for _ in range(_MOST_COMMANDS):
            patience_s: float | None = 0.0
            if self._is_gathering():
                patience_s = max(0.0, gather_until - time.monotonic())
            elif not (self._engine.has_work or self._engine.wants_calibration):
                patience_s = None
            try:
                command = self._commands.get(patience_s != 0, patience_s)
            except queue.Empty:
                return True
            if command is None:
                self._deliver(self._engine.abort_all())
                return False
            _answer(*command)
        return True

    def _is_gathering(self) -> bool:
        """Whether nothing runs yet, and others are on their way to those that could: one run serves them all."""
        scheduler = self._engine.scheduler
        return bool(scheduler.waiting) and not scheduler.running and self._num_unfinished > len(scheduler.waiting)

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except BaseException as error:  # a library's panic too: without this thread everybody would wait for ever
            log.exception("a step failed; all running requests are ended")
            events = self._engine.abort_all(error)
        self._deliver(events)

    def _deliver(self, events: list[TokenEvent]) -> None:
        """Hand events to their readers: every event loop is woken once for all of them."""
        by_loop: dict[asyncio.AbstractEventLoop, _Batch] = {}
        for event in events:
            if channel := self._channels.get(event.request_id):
                by_loop.setdefault(channel.loop, []).append((channel, event))
        for loop, batch in by_loop.items():
            for channel, _ in batch:  # first: whoever reads a last event finds its place free
                if not self._engine.is_live(channel.request_id):
                    self._forget(channel)
            try:
                loop.call_soon_threadsafe(_hand_out, batch)
            except RuntimeError:  # the event loop of these readers is closed
                for channel, _ in batch:
                    self._engine.abort(channel.request_id)
                    self._forget(channel)


def _hand_out(batch: _Batch) -> None:
    for channel, event in batch:
        channel.deliver(event)


def _log_failure(ended: Future[None]) -> None:
    if error := ended.exception():
        log.error("A request that nobody reads could not be ended.", exc_info=error)


def _answer(future: Future[Any], action: Action) -> None:
    """Run a command, unless nobody waits for it any more. Whatever goes wrong is told to the caller."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = action()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
