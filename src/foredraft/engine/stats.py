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
    # What K and V take: of every token, in layers that see everything, and of a sequence in layers with a window.
    kv_bytes_per_token: int
    kv_bytes_per_window: int
    free_window_blocks: int = 0  # of layers with a window, where these have fewer blocks
    num_window_blocks: int = 0
    misfit_heads: tuple[str, ...] = ()  # that do not seem to belong to the model

    @property
    def kv_use(self) -> float:
        """The used share of the KV cache, or of its layers with a window where that is larger; 1 is all."""
        of_windows = 1 - self.free_window_blocks / self.num_window_blocks if self.num_window_blocks else 0.0
        return max(1 - self.free_blocks / self.num_blocks, of_windows)
