"""llama.cpp through llama-cpp-python, for peers.py; its library is the one that `make` builds for this very CPU. Its
prompt lookup needs logits of all rows, so it has an object of its own; drafts of different lengths share that one."""

from __future__ import annotations

import time

from llama_cpp import Llama, __version__
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from peer_serve import Writing, drafts, serve

CONTEXT = 1024


class LlamaEngine:
    def __init__(self, model: str, threads: int) -> None:
        self.lookup = LlamaPromptLookupDecoding()
        common = {"n_ctx": CONTEXT, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
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


if __name__ == "__main__":
    serve(LlamaEngine)
