"""The sweeps that set the constants of the controller, in simulated time (tests/unit/test_controller_mixes.py).

    make bench-constants [ARGS="CONSTANT ..."]

Every value of a constant is tried with the others as they are, on every machine and mix of proposers, with run times
that vary by a fifth. Printed are the mean and the least speed of `auto` in units of the best fixed setting, and the
least with a bad head in units of `auto` without it.
"""

from __future__ import annotations

import argparse
from functools import cache
from statistics import geometric_mean

from tests.unit.controller_world import World
from tests.unit.test_controller_mixes import MACHINES, MIXES, SETTINGS

from foredraft.control import acceptance, controller, worth

SWEEPS = {
    "_SHARE": (controller, (0.0025, 0.005, 0.01)),
    "_ALLOWANCE": (controller, (1.0, 2.0, 4.0, 8.0)),
    "_UNNOTICED_S": (controller, (0.005, 0.01, 0.015, 0.02)),
    "_MOST_SAVED": (controller, (8.0, 16.0, 64.0, 256.0)),
    "_PACE_MEMORY": (controller, (0.9, 0.98, 0.995)),
    "_RECENT": (worth, (8, 32, 64)),
    "_OWN_PRIOR": (worth, (2.0, 8.0, 32.0)),
    "_NEXT_TO_NOTHING": (worth, (0.03, 0.1, 0.2)),
    "_MEASURED": (worth, (0, 8, 32)),
    "_PRIOR": (acceptance, (10.0, 30.0, 100.0)),
    "_OWN_TRIALS": (acceptance, (4.0, 16.0, 64.0)),
}


def write(machine: str, mix: str, count: int, setting: dict[str, int] | None = None) -> World:
    """With the first `count` proposers of a mix."""
    players = MIXES[mix](MACHINES[machine].curve.seconds_at(1))[:count]
    return World(MACHINES[machine], players, noise=0.2, fixed=setting).write(150, requests=6, prompt=100)


@cache
def best(machine: str, mix: str) -> float:
    return max(write(machine, mix, 2, setting).speedup for setting in SETTINGS)


def report(label: str) -> None:
    ratios: list[float] = []
    beside: list[float] = []
    for machine in MACHINES:
        for mix in MIXES:
            auto = write(machine, mix, 2).speedup
            ratios.append(auto / best(machine, mix))
            if "bad" in mix:
                beside.append(auto / write(machine, mix, 1).speedup)
    print(
        f"{label:22} mean {geometric_mean(ratios):.3f}  least {min(ratios):.3f}  bad head {min(beside):.3f}", flush=True
    )


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
