"""The engines of peers.py: one process holds one of them, reads requests and writes answers, each one line of JSON.

    python benchmarks/peer_engines.py foredraft|llama|openvino|transformers --model FILE.gguf --threads 2

A request is {"prompt": token ids, "max_tokens": n, "stop": token ids, "mode": "plain" or the name of a speculation};
an answer is {"token_ids", "first_tokens", "prefill_s", "decode_s"}, or {"error": why}. The first line tells the
engine's version and settings. Every engine has an environment of its own, so only its class imports it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass
class Writing:
    """When which tokens came. Those that one run of the model gives together arrive together."""

    started: float
    arrivals: list[tuple[float, list[int]]] = field(default_factory=list)


class Engine(Protocol):
    about: dict[str, str]  # "version", and "settings" where there is something to say about them

    def write(self, prompt: list[int], max_tokens: int, stop: list[int], mode: str) -> Writing:
        """Greedy, with nothing remembered from earlier prompts."""


def drafts(mode: str) -> int:
    """How many tokens a mode such as "lookup-5" drafts at once; 0 for plain decoding."""
    return 0 if mode == "plain" else int(mode.removeprefix("lookup-"))


class ForedraftEngine:
    """int4, and one LLM per speculation setting."""

    def __init__(self, model: str, threads: int) -> None:
        from foredraft import __version__

        self.options = {"dtype": "int4", "device": "cpu", "threads": threads, "prefix_caching": False}
        self.model = model
        self.llms: dict[str, Any] = {}
        self.learnt: dict[str, Any] = {}
        self.about = {"version": __version__}

    def write(self, prompt: list[int], max_tokens: int, stop: list[int], mode: str) -> Writing:
        from foredraft import LLM, SamplingParams
        from foredraft.bench.measure import Learnt
        from foredraft.proposers.registry import parse_spec

        spec = "off" if mode == "plain" else mode
        if spec not in self.llms:
            self.llms[spec] = LLM(self.model, spec=spec, **self.options)
        engine = self.llms[spec].engine
        engine.speculation.clear()
        if spec in self.learnt:
            self.learnt[spec].back_to(engine)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop)
        writing = Writing(time.perf_counter())
        engine.add("0", prompt, params, parse_spec(spec))
        while engine.has_work:
            tokens = [event.token_id for event in engine.step() if event.token_id is not None]
            if tokens:
                writing.arrivals.append((time.perf_counter(), tokens))
        self.learnt.setdefault(spec, Learnt(engine))  # by then the warm-up has made a controller, if one is needed
        return writing


class LlamaEngine:
    """llama.cpp through llama-cpp-python; its library is the one that `make` builds for this very CPU. Its prompt
    lookup needs logits of all rows, so it has an object of its own; drafts of different lengths share that one."""

    CONTEXT = 1024

    def __init__(self, model: str, threads: int) -> None:
        from llama_cpp import Llama, __version__
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.lookup = LlamaPromptLookupDecoding()
        common = {"n_ctx": self.CONTEXT, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        self.plain = Llama(model, **common)
        self.speculative = Llama(model, **common, logits_all=True, draft_model=self.lookup)
        self.about = {
            "version": f"through llama-cpp-python {__version__}",
            "settings": "built for this CPU; the prompt lookup is the binding's own",
        }

    def write(self, prompt: list[int], max_tokens: int, stop: list[int], mode: str) -> Writing:
        llm = self.plain if mode == "plain" else self.speculative
        self.lookup.num_pred_tokens = drafts(mode)
        llm.reset()  # otherwise it goes on from what the prompt shares with the last one
        writing = Writing(time.perf_counter())
        tokens = llm.generate(prompt, temp=0.0)
        for token in tokens:
            writing.arrivals.append((time.perf_counter(), [token]))
            if len(writing.arrivals) == max_tokens or token in stop:
                break
        tokens.close()
        return writing


class OpenVinoEngine:
    """OpenVINO GenAI. Its usual pipeline, the only one with prompt lookup, needs instructions that some ARM processors
    do not have. There its older pipeline is taken, in float32, because float16 does not compile."""

    MAX_NGRAM = 3

    def __init__(self, model: str, threads: int) -> None:
        import openvino_genai as genai

        self.genai: Any = genai
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
        genai = self.genai
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 1  # GB
        return genai.LLMPipeline(
            self.model, "CPU", INFERENCE_NUM_THREADS=self.threads, scheduler_config=scheduler, **further
        )

    def write(self, prompt: list[int], max_tokens: int, stop: list[int], mode: str) -> Writing:
        import numpy as np
        import openvino

        genai = self.genai
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.stop_token_ids = set(stop)
        pipeline = self.plain
        if mode != "plain":
            self.speculative = self.speculative or self._pipeline(prompt_lookup=True)
            pipeline = self.speculative
            config.num_assistant_tokens, config.max_ngram_size = drafts(mode), self.MAX_NGRAM
        ids = np.array([prompt], dtype=np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        result = pipeline.generate(inputs, config)
        return _openvino_writing(list(result.tokens[0]), result.perf_metrics)


def _openvino_writing(tokens: list[int], metrics: Any) -> Writing:
    """From its own clock: when each run of the model was done, and how many tokens that gave."""
    ticks_per_s = 1000
    raw = metrics.raw_metrics
    times, sizes = list(raw.m_new_token_times), list(raw.m_batch_sizes)
    assert len(times) == len(sizes) and sum(sizes) >= len(tokens), "its clock must tell when every token came"
    first_s = metrics.get_ttft().mean / 1000
    writing = Writing(0.0)
    for at, size in zip(times, sizes):
        writing.arrivals.append((first_s + (at - times[0]) / ticks_per_s, tokens[:size]))
        tokens = tokens[size:]
    return writing


class TransformersEngine:
    """transformers in float32: inference mode, fused attention, its own KV cache and prompt lookup."""

    def __init__(self, model: str, threads: int) -> None:
        os.environ["TQDM_DISABLE"] = "1"
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoModelForCausalLM, __version__
        from transformers.utils import logging

        logging.set_verbosity_error()
        torch.set_num_threads(threads)
        file = Path(model)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.about = {"version": __version__, "settings": "float32"}

    def write(self, prompt: list[int], max_tokens: int, stop: list[int], mode: str) -> Writing:
        ids = self.torch.tensor([prompt])
        clock = Clock()
        with self.torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=stop or None,
                pad_token_id=0,
                streamer=clock,
                **({} if mode == "plain" else {"prompt_lookup_num_tokens": drafts(mode)}),
            )
        return Writing(clock.started, clock.arrivals[1:])  # the first to come is the prompt


class Clock:
    """A streamer that notes which tokens come when."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.arrivals: list[tuple[float, list[int]]] = []

    def put(self, value: Any) -> None:
        self.arrivals.append((time.perf_counter(), value.flatten().tolist()))

    def end(self) -> None:
        """Nothing is left to note."""


ENGINES: dict[str, Callable[[str, int], Engine]] = {
    "foredraft": ForedraftEngine,
    "llama": LlamaEngine,
    "openvino": OpenVinoEngine,
    "transformers": TransformersEngine,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
        for answer in _answers(lambda: ENGINES[options.engine](options.model, options.threads)):
            print(json.dumps(answer), file=answers, flush=True)


def _answers(load: Callable[[], Engine]) -> Iterable[dict[str, Any]]:
    try:
        engine = load()
    except Exception as error:
        yield _failure(error)
        return
    yield engine.about
    for line in sys.stdin:
        request = json.loads(line)
        try:
            writing = engine.write(**request)
            yield _measured(writing, request["max_tokens"], request["stop"])
        except Exception as error:
            yield _failure(error)


def _measured(writing: Writing, max_tokens: int, stop: list[int]) -> dict[str, Any]:
    """Only tokens up to the end of the answer count, and only time until the last of them came."""
    tokens: list[int] = []
    first_tokens = 0
    first = last = writing.started
    for at, arrived in writing.arrivals:
        kept = arrived[: max_tokens - len(tokens)]
        kept = kept[: next((place + 1 for place, token in enumerate(kept) if token in stop), len(kept))]
        if not kept:
            break
        tokens += kept
        last = at
        if not first_tokens:
            first, first_tokens = at, len(kept)
        if len(tokens) == max_tokens or tokens[-1] in stop:
            break
    return {
        "token_ids": tokens,
        "first_tokens": first_tokens,
        "prefill_s": first - writing.started,
        "decode_s": last - first,
    }


def _failure(error: Exception) -> dict[str, str]:
    traceback.print_exception(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return {"error": f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"}


if __name__ == "__main__":
    main()
