"""The sweeps that set the constants of the controller, in simulated time (tests/unit/test_controller_mixes.py).

    make bench-constants [ARGS="CONSTANT ..."]

Every value of a constant is tried with the others as they are, on every machine and mix of proposers, with run times
that vary by a fifth. Printed are the mean and the least speed of `auto` in units of the best fixed setting, the least
with a bad head in units of `auto` without it, and the speed in units of `off` with requests that differ: a small model
on a GPU, whose head nearly takes a plain step for a draft, so that it gains with some requests and loses with others.
"""

from __future__ import annotations

import argparse
from functools import cache
from statistics import geometric_mean

from tests.unit.controller_world import ROWS, Place, Player, World, chance
from tests.unit.test_controller_mixes import MACHINES, MIXES, SETTINGS

from foredraft.control import acceptance, controller, ledger, worth
from foredraft.control.costs import Calibration
from foredraft.control.economics import VerifyCurve

GPU = Calibration(VerifyCurve(ROWS, (0.00065, 0.0008, 0.00081, 0.00082, 0.00083, 0.00086, 0.001)), 0, 0.0)
KINDS = (
    0.55,
    0.68,
    0.68,
    0.78,
    0.76,
    0.8,
    0.55,
    0.58,
    0.62,
    0.5,
    0.66,
    0.82,
    0.55,
)  # of requests: how often it is right
DECIDING_S = (0.00012, 0.00025)

SWEEPS = {
    "_SHARE": (controller, (0.0025, 0.005, 0.01)),
    "_ALLOWANCE": (controller, (1.0, 2.0, 4.0, 8.0)),
    "_UNNOTICED_S": (controller, (0.005, 0.01, 0.015, 0.02)),
    "_MOST_SAVED": (controller, (8.0, 16.0, 64.0, 256.0)),
    "PACE_MEMORY": (ledger, (0.9, 0.98, 0.995)),
    "_RECENT": (worth, (8, 32, 64)),
    "_OF_ONE": (worth, (2, 4, 8, 32)),
    "_OWN_PRIOR": (worth, (2.0, 3.0, 8.0, 32.0)),
    "_OWN_MEMORY": (worth, (0.9, 0.95, 0.98)),
    "_NEXT_TO_NOTHING": (worth, (0.03, 0.1, 0.2)),
    "_MEASURED": (worth, (0, 8, 32)),
    "_PRIOR": (acceptance, (0.5, 2.0, 8.0)),
    "_MEMORY": (acceptance, (0.98, 0.99, 0.998)),
}


def write(machine: str, mix: str, count: int, setting: dict[str, int] | None = None) -> World:
    """With the first `count` proposers of a mix."""
    players = MIXES[mix](MACHINES[machine].curve.seconds_at(1))[:count]
    return World(MACHINES[machine], players, noise=0.2, fixed=setting).write(150, requests=6, prompt=100)


@cache
def best(machine: str, mix: str) -> float:
    return max(write(machine, mix, 2, setting).speedup for setting in SETTINGS)


def differing(deciding_s: float) -> float:
    """With requests of all kinds in turn."""

    def right(place: Place) -> float:
        mean = KINDS[place[0] % len(KINDS)]
        least, most = mean - 0.35, min(0.98, mean + 0.2)
        return most if chance(11, *place) < (mean - least) / (most - least) else least

    head = Player(
        "head",
        right,
        query_s=0.0006,
        node_s=0.00001,
        missing_s=4e-7,
        is_free=False,
        most=8,
        acceptance=(0.74,) * 8,
        seed=2,
    )
    return World(GPU, [head], noise=0.2, deciding_s=deciding_s).write(128, requests=3 * len(KINDS), prompt=80).speedup


def report(label: str) -> None:
    ratios: list[float] = []
    beside: list[float] = []
    for machine in MACHINES:
        for mix in MIXES:
            auto = write(machine, mix, 2).speedup
            ratios.append(auto / best(machine, mix))
            if "bad" in mix:
                beside.append(auto / write(machine, mix, 1).speedup)
    differ = geometric_mean(map(differing, DECIDING_S))
    figures = f"mean {geometric_mean(ratios):.3f}  least {min(ratios):.3f}  bad head {min(beside):.3f}"
    print(f"{label:22} {figures}  requests differ {differ:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("constants", nargs="*", default=list(SWEEPS), metavar="CONSTANT")
    for name in parser.parse_args().constants:
        module, values = SWEEPS[name]
        chosen = getattr(module, name)
        for value in values:
            setattr(module, name, value)
            report(f"{name} = {value}{' *' if value == chosen else ''}")
        setattr(module, name, chosen)


if __name__ == "__main__":
    main()
