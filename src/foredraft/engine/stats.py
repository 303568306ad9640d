"""What an engine tells about itself while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """The load of an engine at one moment. Samples of a request count one by one."""

    waiting: int  # sequences that have not begun, or were preempted
    running: int
    free_blocks: int  # of the KV cache
    num_blocks: int
    num_steps: int  # since the engine was made
    step_times_s: tuple[float, ...]  # of the last steps, oldest first
    misfit_heads: tuple[str, ...] = ()  # that do not seem to belong to the model

    @property
    def kv_use(self) -> float:
        """The used share of the KV cache; 1 is all."""
        return 1 - self.free_blocks / self.num_blocks
