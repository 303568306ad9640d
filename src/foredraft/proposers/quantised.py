"""Guesses with the target's own weights in fewer bits: agrees with it nearly always, and reads a fraction of the bytes.
Costs a run of the smaller copy per guessed token, and its memory.
Shines where the target is large and held in high precision."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.backends.choose import choose_backend
from foredraft.engine.runner import Runner
from foredraft.errors import InvalidSpec
from foredraft.models.decoder import load_decoder
from foredraft.proposers.base import TargetModel
from foredraft.proposers.drafting import AccountingDrafter


@dataclass(frozen=True)
class QuantisedOptions:
    k: int = 4  # tokens guessed
    bits: int = 4  # of the copy's weights

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 32:
            raise InvalidSpec(f"quantised: k={self.k} must be from 1 to 32.")
        if self.bits not in (4, 8):
            raise InvalidSpec(f"quantised: bits={self.bits} must be 4 or 8.")


class Quantised(AccountingDrafter):
    """See the module."""

    Options = QuantisedOptions

    def __init__(self, options: QuantisedOptions, target: TargetModel) -> None:
        dtype, config = f"int{options.bits}", target.checkpoint.config
        backend = choose_backend(target.runner.backend.name, dtype, target.runner.backend.device, target.threads)
        decoder = load_decoder(target.checkpoint, dtype, target.max_model_len, backend)
        layers = target.kv.add_group(f"quantised {dtype}", config, backend)
        runner = Runner(decoder, backend, layers)
        super().__init__("quantised", runner, target.kv.block_size, options.k, config.vocab_size)
