"""The heads that come with Foredraft, exported to layouts of other engines and read back: as many tokens per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.errors import InvalidModel
from foredraft.heads.engines import Engine
from foredraft.heads.export import export
from foredraft.heads.kinds import SHIPPED
from foredraft.llm import LLM
from foredraft.models.catalog import open_checkpoint
from foredraft.params import SamplingParams
from foredraft.reports.prompts import read_suite, spread

SUITE = Path(__file__).parents[3] / "shared" / "data" / "spec_bench_dev.jsonl"  # beside the repository, where it is
QUESTIONS, TOKENS = 60, 64
HEADS = SHIPPED / "smollm2-135m"
ENGINES = (Engine.vllm, Engine.sglang, Engine.speculators)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def tokens_per_run(model: Path, head: str) -> float:
    questions = spread(read_suite(SUITE), QUESTIONS)
    llm = LLM(str(model), head=head, spec="off", max_num_seqs=16)
    params = SamplingParams(max_tokens=TOKENS, temperature=0)
    outputs = llm.generate([question.encoded(llm) for question in questions], params, spec="eagle")
    llm.close()
    accepted, drafts = (sum(getattr(o.metrics, name) for o in outputs) for name in ("accepted_tokens", "drafts"))
    return 1 + accepted / drafts


def test_an_eagle_head_reaches_as_much_after_every_export(default_model: Path, tmp_path: Path) -> None:
    """The file has 4 bits and an export bfloat16, which is quantised when it is loaded, as the target is."""
    if not SUITE.exists():
        pytest.skip(f"{SUITE} is not there")
    reached = {"original": tokens_per_run(default_model, "auto")}
    for engine in ENGINES:
        out = tmp_path / engine.name
        export(HEADS / "eagle", engine, out, open_checkpoint(default_model), "HuggingFaceTB/SmolLM2-135M-Instruct")
        reached[engine.name] = tokens_per_run(default_model, str(out))
    assert reached["original"] > 2
    assert reached == pytest.approx(dict.fromkeys(reached, reached["original"]), rel=0.01)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_block_of_injected_rows_has_no_place_in_other_layouts(
    default_model: Path, tmp_path: Path, engine: Engine
) -> None:
    with pytest.raises(InvalidModel, match=r"no place for .* rows .*input=masked,correction=markov"):
        export(HEADS / "dflash", engine, tmp_path / "out", open_checkpoint(default_model), "target")
