"""benchmarks/replay.py counts what the engine counts, without running the model again."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft import LLM, SamplingParams
from tests.tiny_models import random_model, save_model

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 48


@pytest.mark.parametrize("spec", ["ngram:k=3", "suffix:k=6", "suffix:k=4,tree=chain,min_score=0.25"])
def test_a_replay_counts_what_the_engine_counts(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import replay

    llm = LLM(str(save_model(random_model("llama"), tmp_path)), spec="off", dtype="float32", max_num_seqs=1)
    prompts = [[3 + (step * factor) % 11 for step in range(20)] for factor in (1, 4, 1)]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    plain = [llm.generate(prompt, params)[0] for prompt in prompts]
    metrics = [llm.generate(prompt, params, spec=spec)[0].metrics for prompt in prompts]
    found = replay.replay(replay.token_proposer(spec), plain, MAX_TOKENS)
    drafts, accepted = sum(each.drafts for each in metrics), sum(each.accepted_tokens for each in metrics)
    assert accepted > 0
    assert found["mean acceptance length"] == 1 + accepted / drafts
    assert found["acceptance rate"] == accepted / sum(each.drafted_tokens for each in metrics)
    assert found["tokens per run"] == len(prompts) * MAX_TOKENS / sum(each.target_runs for each in metrics)
