"""What a machine is measured by, on a model that takes no time."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft import LLM
from foredraft.simulate.measure import _draw_s, measured_machine
from tests.tiny_models import random_model, save_model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draws_are_timed_along_a_draft_that_is_right(tmp_path: Path, temperature: float) -> None:
    llm = LLM(str(save_model(random_model("llama"), tmp_path)), kv_cache_tokens=256, max_model_len=200)
    assert 0 < _draw_s(llm, temperature) < 0.1


def test_a_measurement_tells_how_far_it_is(tmp_path: Path) -> None:
    llm = LLM(str(save_model(random_model("llama"), tmp_path)), max_model_len=400, prefix_caching=False, threads=1)
    told: list[tuple[int, int]] = []
    measured_machine(llm, "tiny", ["suffix"], lambda *now: told.append(now))
    assert [done for done, _ in told] == list(range(1, told[-1][1] + 1))
