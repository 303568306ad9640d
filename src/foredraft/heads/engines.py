"""The engines in whose layouts `foredraft export` writes. No torch: the command line reads this."""

from __future__ import annotations

from enum import StrEnum


class Engine(StrEnum):
    vllm = "vllm"
    sglang = "sglang"
    speculators = "speculators"
    deepseek = "deepseek"
    qwen = "qwen"

    @property
    def label(self) -> str:
        """For the beginning of a sentence."""
        labels = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "The speculators format"}
        return {**labels, "deepseek": "DeepSeek's layout", "qwen": "Qwen's layout"}[self.value]

    @property
    def is_of_models(self) -> bool:
        """Whether it is that of a whole model, with the head inside."""
        return self in (Engine.deepseek, Engine.qwen)
