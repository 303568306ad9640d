"""OpenVINO GenAI, for peers.py. Its usual pipeline, the only one with prompt lookup, needs instructions that some ARM
processors do not have; there its older pipeline is taken, in float32, because float16 does not compile."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from peer_serve import Writing, drafts, serve

MAX_NGRAM = 3
TICKS_PER_S = 1000  # of its times of tokens


class OpenVinoEngine:
    def __init__(self, model: str, threads: int) -> None:
        self.model, self.threads = model, threads
        self.about = {"version": genai.__version__.partition("-")[0]}
        try:
            self.plain = self._pipeline()
        except RuntimeError as error:
            print(f"The usual pipeline does not load: {error}", file=sys.stderr)
            self.plain = genai.LLMPipeline(
                model, "CPU", INFERENCE_NUM_THREADS=threads, ATTENTION_BACKEND="SDPA", INFERENCE_PRECISION_HINT="f32"
            )
            self.about["settings"] = "SDPA pipeline, float32"
        self.speculative: Any = None

    def _pipeline(self, **further: Any) -> Any:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 1  # GB
        return genai.LLMPipeline(
            self.model, "CPU", INFERENCE_NUM_THREADS=self.threads, scheduler_config=scheduler, **further
        )

    def write(self, prompt: list[int], max_tokens: int, stop: list[int], mode: str) -> Writing:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.stop_token_ids = set(stop)
        pipeline = self.plain
        if mode != "plain":
            self.speculative = self.speculative or self._pipeline(prompt_lookup=True)
            pipeline = self.speculative
            config.num_assistant_tokens, config.max_ngram_size = drafts(mode), MAX_NGRAM
        ids = np.array([prompt], dtype=np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        result = pipeline.generate(inputs, config)
        return _writing(list(result.tokens[0]), result.perf_metrics)


def _writing(tokens: list[int], metrics: Any) -> Writing:
    """From its own clock: when each run of the model was done, and how many tokens that gave."""
    raw = metrics.raw_metrics
    times, sizes = list(raw.m_new_token_times), list(raw.m_batch_sizes)
    assert len(times) == len(sizes) and sum(sizes) >= len(tokens), "its clock must tell when every token came"
    first_s = metrics.get_ttft().mean / 1000
    writing = Writing(0.0)
    for time, size in zip(times, sizes):
        writing.arrivals.append((first_s + (time - times[0]) / TICKS_PER_S, tokens[:size]))
        tokens = tokens[size:]
    return writing


if __name__ == "__main__":
    serve(OpenVinoEngine)
