"""More tokens for a trained EAGLE head, without more bytes: rows of its output head for the most frequent tokens stay,
those of all others become the target's times one matrix, which is fitted to the rows that the head has. Then train on.

    python tools/map_outputs.py HEAD --out WIDER --model MODEL --text HEAD/text --own 14336 --vocab 32768
    foredraft train eagle:own=14336 --model MODEL --out WIDER …
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from foredraft.heads.base import D2T, MAPPED, OUTPUT_MAP, T2D, HeadConfig
from foredraft.heads.files import read_tensors, target_digest, write_head
from foredraft.models.catalog import open_checkpoint, resolve
from foredraft.train.shards import read_text
from foredraft.train.vocabulary import draft_vocabulary, frequencies

LM_HEAD = "lm_head.weight"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--text", type=Path, required=True, help="the training text, which says how frequent tokens are"
    )
    parser.add_argument("--own", type=int, required=True, help="tokens that keep rows of their own")
    parser.add_argument("--vocab", type=int, required=True, help="tokens that can be drafted")
    arguments = parser.parse_args()
    config, checkpoint = HeadConfig.read(arguments.head), open_checkpoint(resolve(arguments.model))
    if config.kind != "eagle" or config.mapped_vocab_size:
        raise SystemExit(f"{arguments.head} is no EAGLE head whose output rows are all its own.")
    tensors = read_tensors(arguments.head, config)
    counts = frequencies(read_text(arguments.text, target_digest(checkpoint)), config.target_vocab_size)
    name = "model.embed_tokens.weight" if checkpoint.config.tie_word_embeddings else LM_HEAD
    rows = checkpoint.weight(name).dense().float()
    mapped = arguments.vocab - arguments.own
    tensors |= widened(tensors, rows, counts, arguments.own, arguments.vocab)
    write_head(arguments.out, replace(config, draft_vocab_size=arguments.vocab, mapped_vocab_size=mapped), tensors)


def widened(tensors: dict[str, Tensor], rows: Tensor, counts: Tensor, own: int, size: int) -> dict[str, Tensor]:
    """The tensors that change. `rows` [vocab, hidden] is the target's output head, `counts` [vocab] how often the text
    has each token."""
    known, weight = tensors[T2D].nonzero()[:, 0], tensors[LM_HEAD].float()
    # Least squares, in which frequent tokens weigh more.
    factor = (counts[known] + 20.0).pow(0.25)[:, None]
    matrix = torch.linalg.lstsq(rows[known] * factor, weight * factor).solution
    ids = draft_vocabulary(counts, size)
    is_mapped = torch.zeros(size, dtype=torch.bool)
    is_mapped[counts[ids].argsort(stable=True)[: size - own]] = True
    everything = rows @ matrix
    everything[known] = weight
    names = torch.zeros(len(counts), dtype=torch.bool)
    names[ids] = True
    return {
        D2T: ids - torch.arange(size),
        T2D: names,
        MAPPED: is_mapped,
        LM_HEAD: everything[ids[~is_mapped]].bfloat16(),
        OUTPUT_MAP: matrix.T.contiguous().bfloat16(),
    }


if __name__ == "__main__":
    main()
