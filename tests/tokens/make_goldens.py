"""Make the golden token ids with llama.cpp; README.md beside this file has the command."""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path
from typing import Any

from foredraft.models.catalog import DEFAULT_MODEL
from foredraft.models.gguf import tokenizer as gguf_tokenizer
from foredraft.models.gguf.header import read_header
from tests.gguf_files import write_gguf
from tests.tokens import goldens
from tests.tokens.compare import llama_cpp
from tests.tokens.texts import CONTROL_SPELLINGS, generated_texts, sentencepiece_texts, turns_of
from tests.tokens.vocabularies import (
    Metadata,
    llama_cpp_is_exact,
    metadata_of,
    reduced,
    small_byte_level,
    small_sentencepiece,
)

NUM_IDS = 300  # texts whose ids are written out; of the others there is a fingerprint
TRAINING_SEED = 1  # the small vocabularies are made of other texts than those compared

# What SentencePiece models differ in, as changes of the metadata.
SENTENCEPIECE: dict[str, Metadata] = {
    "llama": {},
    "no prefix": {"tokenizer.ggml.add_space_prefix": False},
    "no bos, eos": {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True},
    "phi3": {"general.name": "Phi3"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-python", type=Path, required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--spec-bench", type=Path, help="questions in Spec-Bench's format, compared as well")
    parser.add_argument("models", nargs="*", metavar="NAME=FILE.gguf", help="files with the same NAME must agree")
    arguments = parser.parse_args()
    files: dict[str, list[Path]] = {}
    for entry in arguments.models:
        name, _, file = entry.partition("=")
        files.setdefault(name, []).append(Path(file))
    for name, several in files.items():
        golden = _real(several, arguments.llama_python)
        if arguments.spec_bench and name == DEFAULT_MODEL:  # the tests have no other real model
            ids = llama_cpp(arguments.llama_python, several[0], turns_of(arguments.spec_bench))[1]
            golden["spec_bench"] = "".join(map(goldens.fingerprint, ids))
        goldens.write(name, golden)
    goldens.write("pre_tokenizers", _pre_tokenizers(arguments.llama_python))
    goldens.write("sentencepiece", _sentencepiece(arguments.llama_python))


def _real(files: list[Path], python: Path) -> dict[str, Any]:
    texts = generated_texts()
    version, ids = llama_cpp(python, files[0], texts)
    assert all(llama_cpp(python, other, texts)[1] == ids for other in files[1:]), files
    return {
        "llama_cpp_python": version,
        "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
        "texts": goldens.digest(texts),
        "fingerprints": "".join(map(goldens.fingerprint, ids)),
        "ids": ids[:NUM_IDS],
        "vocabulary": reduced(read_header(files[0]).metadata, texts),
    }


def _pre_tokenizers(python: Path) -> dict[str, Any]:
    vocabulary = small_byte_level(_training_texts())
    kinds = {kind: {"tokenizer.ggml.pre": kind} for kind in gguf_tokenizer._WORD_CUTS}
    return _variants(python, vocabulary, kinds, generated_texts())


def _sentencepiece(python: Path) -> dict[str, Any]:
    vocabulary = small_sentencepiece(_training_texts())
    return _variants(python, vocabulary, SENTENCEPIECE, sentencepiece_texts())


def _training_texts() -> list[str]:
    texts = generated_texts(seed=TRAINING_SEED)
    return [text for text in texts if not any(spelling in text for spelling in CONTROL_SPELLINGS)]


def _variants(python: Path, vocabulary: Metadata, variants: dict[str, Metadata], texts: list[str]) -> dict[str, Any]:
    """Fingerprints of one vocabulary under several settings; settings with the same ids share an entry."""
    groups: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in variants.items():
            file = write_gguf(Path(folder) / "vocabulary.gguf", {**metadata_of(vocabulary), **changes}, {})
            version, ids = llama_cpp(python, file, texts)
            prints = [
                goldens.fingerprint(each) if llama_cpp_is_exact(name, text) else goldens.NOT_COMPARED
                for text, each in zip(texts, ids, strict=True)
            ]
            groups.setdefault("".join(prints), []).append(name)
    return {
        "llama_cpp_python": version,
        "texts": goldens.digest(texts),
        "vocabulary": vocabulary,
        "same_ids": list(groups.values()),
        **{names[0]: fingerprints for fingerprints, names in groups.items()},
    }


if __name__ == "__main__":
    main()
