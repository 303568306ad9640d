"""Only x86-64 Linux without an NVIDIA device wants another index than PyPI."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "torch_index.py"))


@pytest.mark.parametrize(
    ("system", "machine", "has_nvidia", "wanted"),
    [
        ("linux", "x86_64", False, True),
        ("linux", "x86_64", True, False),
        ("linux", "aarch64", False, False),
        ("darwin", "arm64", False, False),
    ],
)
def test_who_wants_the_builds_for_cpus(system: str, machine: str, has_nvidia: bool, wanted: bool) -> None:
    assert TOOL["wants_cpu_build"](system, machine, has_nvidia) is wanted


def test_an_index_that_cannot_be_reached_is_left_alone() -> None:
    assert not TOOL["can_be_reached"]("http://127.0.0.1:9/nothing")
