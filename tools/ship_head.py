"""Writes a trained head in the bits that it is shipped with.

python tools/ship_head.py TRAINED --out src/foredraft/models/heads/shipped/MODEL/KIND [--bits 8]
    [--target MODEL] [--more NAME=BITS ...]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from foredraft.models.heads.coding import BITS
from foredraft.models.heads.config import HeadConfig
from foredraft.models.heads.files import read_tensors, write_head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bits", type=int, choices=BITS, default=8)
    parser.add_argument("--target", help="the target's name in config.json, if it is to be another")
    parser.add_argument("--more", nargs="*", default=[], metavar="NAME=BITS", help="tensors that have other bits")
    arguments = parser.parse_args()
    config = HeadConfig.read(arguments.trained)
    if arguments.target:
        config = replace(config, target_name=arguments.target)
    tensors = read_tensors(arguments.trained, config)
    bits = dict.fromkeys(tensors, arguments.bits)
    bits |= {name: int(count) for name, count in (each.split("=") for each in arguments.more)}
    write_head(arguments.out, config, tensors, bits)
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"{arguments.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
