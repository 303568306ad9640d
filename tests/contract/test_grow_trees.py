"""Trees that the kernels grow in one call are those that the host would have grown, level by level."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.native.trees import NativeTrees
from foredraft.backends.tree_growth import Growth
from foredraft.batch import PackedBatch
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.model.drafter import TreeDrafter
from foredraft.types import Draft
from tests.published.layouts import LAYOUTS
from tests.published.shapes import TargetShape
from tests.tiny_heads import save_heads
from tests.tiny_models import VOCAB, random_model, save_model

SHAPES = [
    "nodes=12,width=3,k=4",
    "nodes=3,width=4,k=5",
    "nodes=64,width=8,k=8",
    "nodes=64,width=64,k=1",
    "tree=static,nodes=9,width=3,k=3",
    "tree=static,nodes=4,width=2,k=6",
    "tree=chain,k=3",
    "tree=chain,k=64",
]
SETTINGS: dict[str, list[dict[str, Any]]] = {  # of requests that decode at once
    "greedy": [{"temperature": 0}] * 3,
    "noise": [{"temperature": 0.8}, {"temperature": 1.5, "top_p": 0.9, "top_k": 40}, {"temperature": 1.5, "top_k": 2}],
}
PROMPTS = [[(7 * seed + 3 * place) % VOCAB for place in range(10 + 45 * seed)] for seed in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What every call that grew trees was given, the grower itself first."""
    calls: list[tuple[Any, ...]] = []
    grow = NativeTrees.__call__

    def seen(self: NativeTrees, *given: Any) -> Any:
        calls.append((self, *given))
        return grow(self, *given)

    monkeypatch.setattr(NativeTrees, "__call__", seen)
    return calls


def compare(
    load: Callable[[], LLM],
    spec: str,
    grown: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    settings: str = "greedy",
    min_score: float = 0.0,
) -> int:
    """Compares texts and drafts of several sequences at once; returns how often trees were grown in one call."""
    drafts: list[list[Draft]] = []
    propose = TreeDrafter.propose

    def recorded(self: TreeDrafter, sequences: Any, budgets: Any, _: float) -> list[Draft]:
        drafts.append(propose(self, sequences, budgets, min_score))
        return drafts[-1]

    params = [SamplingParams(max_tokens=12, seed=3, ignore_eos=True, **each) for each in SETTINGS[settings]]
    with monkeypatch.context() as patch:
        patch.setattr(TreeDrafter, "propose", recorded)
        texts = [output.token_ids for output in load().generate(PROMPTS, params, spec=spec)]
        found, num_grown = drafts.copy(), len(grown)
        drafts.clear()
        patch.setattr(NativeBackend, "tree_grower", lambda *_: None)
        assert texts == [output.token_ids for output in load().generate(PROMPTS, params, spec=spec)]
    assert len(grown) == num_grown, "the host grew them"
    assert found == drafts and any(draft.tokens for each in found for draft in each)
    return num_grown


@pytest.mark.parametrize("min_score", [0.0, 0.002, 0.03])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_are_those_of_the_host(
    folder: Path,
    tmp_path: Path,
    grown: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    shape: str,
    settings: str,
    min_score: float,
) -> None:
    """Nodes, their order and the last bit of their scores; also where no further level is worth its time."""
    heads = str(save_heads(folder, tmp_path))

    def load() -> LLM:
        return LLM(str(folder), head=heads, spec="off", backend="native", threads=2)

    assert compare(load, f"eagle:{shape}", grown, monkeypatch, settings, min_score) > 5


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith("eagle3/")])
def test_trees_of_published_heads_are_those_of_the_host(
    tmp_path: Path, grown: list[Any], monkeypatch: pytest.MonkeyPatch, name: str, settings: str
) -> None:
    """Whether or not the kernels can grow them."""
    model = random_model("llama", num_hidden_layers=8)
    LAYOUTS[name].write(tmp_path / "head", TargetShape(hidden=model.config.hidden_size, vocab=VOCAB), 7)
    folder = save_model(model, tmp_path)

    def load() -> LLM:
        return LLM(str(folder), head=str(tmp_path / "head"), spec="off", backend="native", threads=2)

    compare(load, "eagle:nodes=12,width=3", grown, monkeypatch, settings)


def test_what_adjusts_logits_leaves_it_to_the_host(folder: Path, tmp_path: Path, grown: list[Any]) -> None:
    """In the same batch and alone; all texts stay as they are."""
    llm = LLM(str(folder), head=str(save_heads(folder, tmp_path)), spec="off", backend="native", threads=2)
    hot, greedy, adjusted = (
        SamplingParams(max_tokens=12, seed=3, ignore_eos=True, **settings)
        for settings in ({"temperature": 0.8}, {"temperature": 0}, {"temperature": 0.8, "presence_penalty": 0.5})
    )
    mixed = [adjusted, hot, greedy]
    plain = [output.token_ids for output in llm.generate(PROMPTS, mixed)]
    assert [output.token_ids for output in llm.generate(PROMPTS, mixed, spec="eagle")] == plain
    assert max(len(lengths) for _, _, lengths, *_ in grown) == 2
    grown.clear()
    assert llm.generate(PROMPTS[0], adjusted, spec="eagle")[0].token_ids == plain[0]
    assert not grown


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path, grown: list[Any]) -> None:
    """Before anything is written where it does not belong."""
    llm = LLM(str(folder), head=str(save_heads(folder, tmp_path)), spec="eagle", backend="native", threads=2)
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    grow, first, lengths, budgets, drawings, growth = grown[1]
    assert grow(first, lengths, budgets, drawings, growth)[0].tokens

    def changed(**arrays: Any) -> PackedBatch:
        batch: PackedBatch = first._replace(**arrays)
        return batch

    narrow, none = first.narrow.copy(), np.zeros((3, 0), np.int32)
    narrow[0] = 7
    for given in (
        (first, lengths, [65], drawings, growth),
        (first, lengths, [-1], drawings, growth),
        (first, [0], budgets, drawings, growth),
        (first, lengths, budgets, drawings, Growth(9, 8, 0.0, None)),
        (first, lengths, budgets, drawings, Growth(0, 4, 0.0, None)),
        (first, lengths, budgets, drawings, Growth(4, 0, 0.0, None)),
        (changed(narrow=narrow), lengths, budgets, drawings, growth),
        (changed(wide=np.zeros((3, 0), np.int64), narrow=none), lengths, budgets, drawings, growth),
        (first, [10**6], budgets, drawings, growth),
        (first, [2**63 - 1], budgets, drawings, growth),
        (changed(block_size=0), lengths, budgets, drawings, growth),
    ):
        with pytest.raises(ValueError, match="grow_trees refused its input"):
            grow(*given)
