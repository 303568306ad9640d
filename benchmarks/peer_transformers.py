"""transformers in float32, for peers.py: inference mode, fused attention, its own KV cache and prompt lookup."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

from peer_serve import Writing, drafts, serve


class TransformersEngine:
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
        self.about = {"version": __version__, "settings": "float32; its bfloat16 is in the table of plain decoding"}

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


if __name__ == "__main__":
    serve(TransformersEngine)
