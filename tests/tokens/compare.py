"""Compare Foredraft's token ids of real GGUF files with llama.cpp's; README.md beside this file has the command."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from foredraft.models.gguf.header import read_header
from foredraft.models.tokenizer import Tokenizer
from tests.tokens.texts import NUM_TEXTS, SEED, generated_texts, turns_of


def llama_cpp(python: Path, file: Path, texts: list[str]) -> tuple[str, list[list[int]]]:
    """The version of llama-cpp-python, and the ids that it gives."""
    command = [python, Path(__file__).parent / "llama_cpp_ids.py", file]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"llama.cpp could not read {file}:\n{done.stderr}")
    answer = json.loads(done.stdout)
    return answer["version"], answer["ids"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-python", type=Path, required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--spec-bench", type=Path, help="questions in Spec-Bench's format, compared as well")
    parser.add_argument("--num-texts", type=int, default=NUM_TEXTS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.gguf")
    arguments = parser.parse_args()
    several = {"generated": generated_texts(arguments.num_texts, arguments.seed)}
    if arguments.spec_bench:
        several["spec-bench"] = turns_of(arguments.spec_bench)
    failed = False
    for file in arguments.files:
        tokenizer = Tokenizer.from_gguf(read_header(file).metadata, file)
        for name, texts in several.items():
            version, expected = llama_cpp(arguments.llama_python, file, texts)
            wrong = [text for text, ids in zip(texts, expected, strict=True) if tokenizer.encode(text) != ids]
            found = f"{len(texts)} texts, {sum(map(len, expected))} tokens, {len(wrong)} texts differ"
            print(f"{file.name}: {name}: {found} from llama-cpp-python {version}", *map(repr, wrong[:3]), sep="\n  ")
            failed = failed or bool(wrong)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
