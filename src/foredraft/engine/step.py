"""One step: the order in which everything happens. The engine, the simulator and the tests of the controller all run
this function, with a real or a simulated target and clock."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from foredraft.engine.chunks import ChunkLimit
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.speculation import Speculation
from foredraft.types import Commit, Stop, Verdict, Work


class Target(Protocol):
    """What checks drafts: the model with its acceptance rules and its cache, or a simulation that knows the answer."""

    runs_ahead: bool  # whether `start` returns while the run goes on

    def start(self, works: list[Work]) -> Callable[[], tuple[list[Verdict], list[Stop]]]:
        """Begin to run the works. What is returned waits for the end: for each work the accepted path and one token
        more, and where that is to be cut."""

    def keep(self, works: Items[Work], verdicts: Items[Verdict], stops: Items[Stop]) -> None:
        """Make the cache hold what was accepted, and nothing else."""


class Stepped(NamedTuple):
    """What a step did, and the seconds that its two halves took."""

    works: list[Work]
    commits: list[Commit]
    stops: list[Stop]
    draft_s: float  # to schedule and to draft
    verify_s: float  # to run the target and to commit


def step(
    scheduler: Scheduler,
    speculation: Speculation,
    target: Target,
    chunk_limit: ChunkLimit,
    clock: Callable[[], float],
) -> Stepped:
    """One run of the target for everybody who is scheduled."""
    begun = clock()
    num_decoding = scheduler.num_decoding
    looks_ahead = not speculation.rests(scheduler.running)
    scheduled = scheduler.schedule(chunk_limit.rows_beside(num_decoding), looks_ahead)
    works = speculation.propose(scheduled)
    drafted = clock()
    finish = target.start(works)
    started = clock()
    speculation.learn()
    learning_s = 0.0 if target.runs_ahead else clock() - started
    verdicts, stops = finish()
    target.keep(works, verdicts, stops)
    commits = scheduler.update_from_output(works, verdicts, stops)
    done = clock()
    chunk_limit.observe(sum([work.num_rows for work in works]), num_decoding, done - begun)
    speculation.observe(works, commits, done - drafted - learning_s, learning_s)
    return Stepped(works, commits, stops, drafted - begun, done - drafted)
