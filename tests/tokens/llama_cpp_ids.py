"""Token ids as llama.cpp gives them. Runs in an environment with llama-cpp-python; needs nothing of this repository.

python llama_cpp_ids.py FILE.gguf < texts.json > ids.json
"""

from __future__ import annotations

import json
import sys

import llama_cpp


def main() -> None:
    llm = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
    texts = json.load(sys.stdin)
    ids = [llm.tokenize(text.encode(), add_bos=True, special=True) for text in texts]
    json.dump({"version": llama_cpp.__version__, "ids": ids}, sys.stdout)


main()
