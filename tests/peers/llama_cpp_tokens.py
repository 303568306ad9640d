"""Runs in the environment of llama-cpp-python: the greedy tokens that llama.cpp adds to a prompt, as one line of JSON.

Usage: llama_cpp_tokens.py MODEL.gguf PROMPT COUNT, where the prompt is a JSON list of token ids.
"""

from __future__ import annotations

import json
import sys

from llama_cpp import GGML_TYPE_F32, Llama  # type: ignore[import-not-found]


def main() -> None:
    path, prompt, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    kinds = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32}
    model = Llama(
        path, n_ctx=512, n_threads=2, logits_all=True, flash_attn=False, swa_full=True, verbose=False, **kinds
    )
    model.eval(prompt)
    tokens = []
    for _ in range(count):
        tokens.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(tokens[-1:])
    print(json.dumps(tokens))


main()
