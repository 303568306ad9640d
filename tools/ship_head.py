"""Writes a trained head, or a distilled draft model, in the bits that it is shipped with.

python tools/ship_head.py TRAINED --out src/foredraft/models/heads/shipped/MODEL/KIND [--bits 8]
    [--target MODEL] [--more NAME=BITS ...] [--vocabulary HEAD]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from foredraft.models.catalog import DEFAULT_MODEL, open_checkpoint, resolve
from foredraft.models.heads.coding import BITS
from foredraft.models.heads.config import HeadConfig
from foredraft.models.heads.files import read_tensors, write_head
from foredraft.models.heads.shapes import D2T
from foredraft.train.draft import as_head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bits", type=int, choices=BITS, default=8)
    parser.add_argument("--target", help="the target's name in config.json, if it is to be another")
    parser.add_argument("--more", nargs="*", default=[], metavar="NAME=BITS", help="tensors that have other bits")
    parser.add_argument(
        "--vocabulary",
        type=Path,
        metavar="HEAD",
        help=f"TRAINED is a draft model of {DEFAULT_MODEL}: keep these tokens",
    )
    arguments = parser.parse_args()
    if arguments.vocabulary:
        config, tensors = as_head(
            arguments.trained, open_checkpoint(resolve(DEFAULT_MODEL)), _tokens(arguments.vocabulary)
        )
    else:
        config = HeadConfig.read(arguments.trained)
        tensors = read_tensors(arguments.trained, config)
    if arguments.target:
        config = replace(config, target_name=arguments.target)
    bits = dict.fromkeys(tensors, arguments.bits)
    bits |= {name: int(count) for name, count in (each.split("=") for each in arguments.more)}
    write_head(arguments.out, config, tensors, bits)
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"{arguments.out}: {size / 1e6:.1f} MB")


def _tokens(head: Path) -> Tensor:
    """The draft vocabulary of a head, by the target's ids."""
    offsets = read_tensors(head, HeadConfig.read(head))[D2T]
    return offsets + torch.arange(len(offsets))


if __name__ == "__main__":
    main()
