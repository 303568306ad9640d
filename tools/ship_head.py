"""Writes a trained head, or a distilled draft model, in the bits that it is shipped with.

python tools/ship_head.py TRAINED --out src/foredraft/heads/shipped/MODEL/KIND [--bits 8]
    [--target NAME] [--more NAME=BITS ...] [--acceptance RATE ...]
python tools/ship_head.py DRAFT --out … --vocabulary HEAD [--model MODEL] [--text TEXT]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from foredraft.backends.weight import Weight
from foredraft.heads.base import D2T, HeadConfig
from foredraft.heads.coding import BITS
from foredraft.heads.draft_model.rounding import rounded_layers
from foredraft.heads.draft_model.train import as_head
from foredraft.heads.files import read_tensors, write_head
from foredraft.models.catalog import DEFAULT_MODEL, open_checkpoint, resolve
from foredraft.train.batches import Batch, Batches
from foredraft.train.shards import read_text

Head = tuple[HeadConfig, dict[str, Tensor | Weight]]
ROUNDING_TOKENS = 12_000  # of the text that rounding looks at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bits", type=int, choices=BITS, default=8)
    parser.add_argument("--target", help="the target's name in config.json, if it is to be another")
    parser.add_argument("--more", nargs="*", default=[], metavar="NAME=BITS", help="tensors that have other bits")
    parser.add_argument(
        "--acceptance", nargs="*", type=float, metavar="RATE", help="by depth, as measured in these bits"
    )
    parser.add_argument("--vocabulary", type=Path, metavar="HEAD", help="the head whose tokens a draft model keeps")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="that a draft model was distilled from")
    parser.add_argument(
        "--text", type=Path, help="its training text: the layers of a draft model are rounded to 4 bits with it"
    )
    arguments = parser.parse_args()
    config, tensors = _draft(arguments) if arguments.vocabulary else _head(arguments.trained)
    if arguments.target:
        config = replace(config, target_name=arguments.target)
    if arguments.acceptance:
        config = replace(config, acceptance=tuple(arguments.acceptance))
    bits = dict.fromkeys(tensors, arguments.bits)
    bits |= {name: int(count) for name, count in (each.split("=") for each in arguments.more)}
    write_head(arguments.out, config, tensors, bits)
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"{arguments.out}: {size / 1e6:.1f} MB")


def _head(folder: Path) -> Head:
    config = HeadConfig.read(folder)
    return config, dict(read_tensors(folder, config))


def _draft(arguments: argparse.Namespace) -> Head:
    target = open_checkpoint(resolve(arguments.model))
    offsets = read_tensors(arguments.vocabulary, HeadConfig.read(arguments.vocabulary))[D2T]
    config, tensors = as_head(arguments.trained, target, offsets + torch.arange(len(offsets)))
    if not arguments.text:
        return config, dict(tensors)
    batches = _batches(arguments.text, config.target_digest)
    return config, tensors | rounded_layers(config, tensors, target.weight("model.embed_tokens.weight"), batches)


def _batches(text: Path, target_digest: str) -> list[Batch]:
    chosen: list[Batch] = []
    for batch in Batches(read_text(text, target_digest), tokens_per_batch=2048, seed=0).from_step(0):
        chosen.append(batch)
        if sum(int(each.lengths.sum()) for each in chosen) > ROUNDING_TOKENS:
            break
    return chosen


if __name__ == "__main__":
    main()
