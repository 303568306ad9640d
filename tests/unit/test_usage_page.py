"""docs/usage.md names every option, sampling parameter and metric."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from foredraft.config import EngineConfig
from foredraft.outputs import SpecMetrics
from foredraft.params import SamplingParams

PAGE = (Path(__file__).parents[2] / "docs" / "usage.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("described", [EngineConfig, SamplingParams, SpecMetrics])
def test_every_field_is_named(described: Any) -> None:
    assert [each.name for each in fields(described) if f"`{each.name}`" not in PAGE] == []
