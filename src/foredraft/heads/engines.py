"""Whose layouts can be written. No torch: the command line reads this."""

from __future__ import annotations

from enum import StrEnum


class Engine(StrEnum):
    vllm = "vllm"
    sglang = "sglang"
    speculators = "speculators"

    @property
    def label(self) -> str:
        """For the beginning of a sentence."""
        return {"vllm": "vLLM", "sglang": "SGLang", "speculators": "The speculators format"}[self.value]
