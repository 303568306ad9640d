"""The third claim: on this machine a row's bits do not depend on the rows beside it. The start-up self-test, made
again."""

from __future__ import annotations

from collections.abc import Iterator

from foredraft.audit.report import Check, Tick
from foredraft.backends.row_tiles import agreeing_row_counts
from foredraft.backends.torch import TorchBackend
from foredraft.engine.exactness import layers_agree
from foredraft.errors import InvalidParameter
from foredraft.runtime.runner import Runner

NUM_CHECKS = 2


def row_checks(runner: Runner, tick: Tick) -> Iterator[Check]:
    """One check for the linear layers, one for a whole layer. Nothing is read from the cache of earlier proofs."""
    yield linear_check(runner)
    tick()
    agree = layers_agree(runner.backend, runner.decoder)
    detail = "token by token, at once, in pieces and among others: " + ("the same bits" if agree else "other bits")
    yield Check("rows: a whole layer", agree, detail)
    tick()


def linear_check(runner: Runner) -> Check:
    """Whether all row counts agree that the backend runs its linear layers with."""
    backend = runner.backend
    used = (backend.row_tiles if isinstance(backend, TorchBackend) else None) or backend.row_counts
    try:
        agreeing = agreeing_row_counts(backend, runner.decoder.linears)
    except InvalidParameter as error:
        return Check("rows: linear layers", False, str(error))
    detail = f"the same bits in runs of {_listed(agreeing)} rows; {backend.name} uses {_listed(used)}"
    return Check("rows: linear layers", set(used) <= set(agreeing), detail)


def _listed(counts: tuple[int, ...]) -> str:
    return ", ".join(map(str, counts))
