"""Foredraft itself, for peers.py: int4, one LLM per speculation setting."""

from __future__ import annotations

import time

from peer_serve import Writing, serve

from foredraft import LLM, SamplingParams, __version__
from foredraft.bench.measure import Learnt
from foredraft.proposers.registry import parse_spec


class ForedraftEngine:
    def __init__(self, model: str, threads: int) -> None:
        self.options = {"dtype": "int4", "device": "cpu", "threads": threads, "prefix_caching": False}
        self.model = model
        self.llms: dict[str, LLM] = {}
        self.learnt: dict[str, Learnt] = {}
        self.about = {"version": __version__}

    def write(self, prompt: list[int], max_tokens: int, stop: list[int], mode: str) -> Writing:
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


if __name__ == "__main__":
    serve(ForedraftEngine)
