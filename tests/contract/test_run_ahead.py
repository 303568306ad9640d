"""Trees that grow on the device are those that the host would have grown, level by level."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.backends.torch import TorchBackend
from foredraft.backends.tree_ops import Candidates, Choice, Nodes, TreeOps
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.model.drafter import TreeDrafter
from foredraft.proposers.model.run_ahead import Found, Levels, RunAhead
from foredraft.proposers.model.tree import Tree, TreeShape, static_shares
from foredraft.sampling import likely
from foredraft.types import Draft, Sequence
from tests.published.layouts import LAYOUTS
from tests.published.shapes import TargetShape
from tests.tiny_heads import save_heads
from tests.tiny_models import VOCAB, random_model, save_model
from tests.tree_reference import TorchTreeOps, add_level

CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("eagle:nodes=12,width=3,k=4", 0.0, {}),
    ("eagle:nodes=12,width=3,k=4", 0.7, {}),
    ("eagle:nodes=12,width=3,k=4", 0.7, {"top_p": 0.8, "top_k": 20}),
    ("eagle:nodes=12,width=3,k=4", 1.5, {"top_k": 2}),
    ("eagle:tree=static,nodes=9,width=3,k=3", 0.0, {}),
    ("mtp:nodes=12,width=3,k=4", 0.0, {}),
    ("mtp:tree=chain,k=3", 0.7, {}),
    ("dflash:nodes=12,width=3,k=4", 0.7, {}),
    ("dflash:tree=chain,k=3", 0.0, {}),
    ("draft_model:k=4", 0.0, {}),
    ("draft_model:k=3,width=2", 0.7, {}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


def drafts_of(llm: LLM, spec: str, params: SamplingParams) -> list[Any]:
    """What a proposer drafts at every step of some texts: paths and their scores."""
    prompts = [[(7 * seed + 3 * place) % VOCAB for place in range(10 + 15 * seed)] for seed in range(3)]
    drafts: list[Any] = []
    llm.generate(prompts, params, spec=spec)
    (guarded,) = llm.engine.speculation.assignments.proposers.values()
    proposer = guarded.proposer
    propose = proposer.propose

    def recorded(*arguments: Any) -> Any:
        found = propose(*arguments)
        drafts.extend(
            {tuple(draft.path_tokens(node)): draft.scores[node] for node in range(len(draft))} for draft in found
        )
        return found

    proposer.propose = recorded  # type: ignore[method-assign]
    llm.generate(prompts, params, spec=spec)
    return drafts


@pytest.mark.parametrize(("spec", "temperature", "limits"), CASES)
def test_drafts_are_those_of_the_host(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: str,
    temperature: float,
    limits: dict[str, Any],
) -> None:
    heads = str(save_heads(folder, tmp_path))
    if spec.startswith("draft_model"):
        spec += f",model={folder}"
    compare_with_host(folder, heads, spec, temperature, monkeypatch, **limits)


@pytest.mark.parametrize(
    ("name", "spec", "temperature"),
    [
        ("eagle3/peagle", "eagle:nodes=12,width=3", 0.0),
        ("eagle3/peagle-vllm", "eagle:tree=chain", 0.7),
        ("dflash/zlab-sliding", "dflash:tree=chain", 0.0),
        ("dflash/deepspec-dspark", "dflash:nodes=12,width=3", 0.0),
        ("dflash/deepspec-dspark-gated", "dflash:nodes=12,width=3", 0.7),
    ],
)
def test_drafts_of_published_heads_are_those_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, spec: str, temperature: float
) -> None:
    model = random_model("llama", num_hidden_layers=8)
    LAYOUTS[name].write(tmp_path / "head", TargetShape(hidden=model.config.hidden_size, vocab=VOCAB), 7)
    compare_with_host(save_model(model, tmp_path), str(tmp_path / "head"), spec, temperature, monkeypatch)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_drafts_of_first_layers_are_those_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Which write to the target's own cache, in window blocks too."""
    folder = save_model(random_model(name), tmp_path)
    compare_with_host(folder, None, "early_exit:k=3,width=2", 0.0, monkeypatch)


def compare_with_host(
    folder: Path, heads: str | None, spec: str, temperature: float, monkeypatch: pytest.MonkeyPatch, **limits: Any
) -> None:
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True, **limits)
    used = []
    run = RunAhead.__call__

    def counted(self: RunAhead, *given: Any) -> Any:
        used.append(given)
        return run(self, *given)

    monkeypatch.setattr(RunAhead, "__call__", counted)
    monkeypatch.setattr(likely, "CONTENDERS", VOCAB)  # the device always looks at all tokens
    found = []
    for ops in (None, TorchTreeOps()):
        monkeypatch.setattr(TorchBackend, "tree_ops", ops)
        llm = LLM(str(folder), head=heads, spec="off", backend="torch", dtype="float32", device="cpu", exact=False)
        found.append(drafts_of(llm, spec, params))
        assert bool(used) == (ops is not None)
    host, device = found
    assert len(host) == len(device) > 8
    for expected, paths in zip(host, device, strict=True):
        assert paths == pytest.approx(expected, rel=1e-4)


def test_shallow_drafts_leave_the_text_as_it_is(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a draft is shallower than what was accepted of the one before."""
    depths: list[int] = []
    run, propose = RunAhead.__call__, TreeDrafter.propose

    def seen(self: RunAhead, works: Any, first: Any, shape: TreeShape, *limits: Any) -> Any:
        depths.append(shape.depth)
        return run(self, works, first, shape, *limits)

    def demanding(self: TreeDrafter, sequences: Any, budgets: Any, min_score: float) -> list[Draft]:
        return propose(self, sequences, budgets, (0.999, 1e-9)[len(depths) // 3 % 2])

    monkeypatch.setattr(TorchBackend, "tree_ops", TorchTreeOps())
    monkeypatch.setattr(RunAhead, "__call__", seen)
    monkeypatch.setattr(TreeDrafter, "propose", demanding)
    heads = str(save_heads(folder, tmp_path))
    llm = LLM(str(folder), head=heads, spec="off", backend="torch", dtype="float32", device="cpu", exact=False)
    params = [SamplingParams(max_tokens=24, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 0.8)]
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]]
    plain = [output.token_ids for output in llm.generate(prompts, params)]
    depths.clear()  # of warming
    for spec in ("eagle:k=5,nodes=12", "mtp:k=4,tree=chain"):
        assert [output.token_ids for output in llm.generate(prompts, params, spec=spec)] == plain
        assert len(set(depths)) > 1
        depths.clear()


def level(ops: TreeOps, found: Candidates, before: Nodes | None, depth: int, shape: TreeShape, sequences: int) -> Nodes:
    rows = sequences * shape.width
    offsets = torch.arange(rows, dtype=torch.int32) + 100 * depth
    made = Nodes(
        *(torch.zeros(rows, dtype=torch.int64) for _ in range(3)),
        torch.zeros(rows, dtype=torch.float64),
        torch.zeros((rows, shape.depth), dtype=torch.int32),
        offsets,
    )
    ops.grow(found, before, depth, sequences, Choice(None, keeps_first=not shape.prunes), made)
    return made


@pytest.mark.parametrize("prunes", [True, False])
def test_nodes_are_chosen_by_the_rule_of_trees(prunes: bool) -> None:
    """Also where probabilities are equal."""
    shape = TreeShape(depth=3, width=3, prunes=prunes, nodes=9 if prunes else 0)
    generator = torch.Generator().manual_seed(5)
    sequence = Sequence(1, "", 0, [1, 2], 1, SamplingParams().resolved({}), seed=0, max_tokens=9)
    tree = Tree(sequence, shape, 64, 2, 16)
    before, ops = None, TorchTreeOps()
    for depth in (1, 2, 3):
        rows = 1 if depth == 1 else shape.width
        shares = torch.randint(1, 5, (rows, 4), generator=generator).sort(descending=True).values / 10
        tokens = torch.randint(0, 99, (rows, 4), generator=generator)
        before = level(ops, Candidates(tokens, shares), before, depth, shape, 1)
        first = len(tree.tokens) - rows if depth > 1 else -1
        pairs = [list(zip(*row)) for row in zip(tokens.tolist(), shares.tolist(), strict=True)]
        add_level(tree, first, pairs)
        above = (depth - 2) * shape.width if depth > 1 else -1
        assert tree.tokens[-shape.width :] == before.token_ids.tolist()
        assert tree.parents[-shape.width :] == [parent + above for parent in before.parents.tolist()]
        assert tree.weights[-shape.width :] == before.weights.tolist()


def test_the_likeliest_path_comes_first() -> None:
    """Where it is accepted, nothing has to be moved."""
    probabilities = np.array([[0.6, 0.3], [0.7, 0.2], [0.5, 0.4], [0.9, 0.05], [0.8, 0.1]], np.float32)
    found = Found(np.array([*range(10), 0, 1, 0, 2]), probabilities)
    program: Any = SimpleNamespace(shape=TreeShape(3, 2, prunes=True, nodes=5), size=1, found=found)
    levels = Levels(program)
    draft = levels.draft(0, 5, "test")
    assert draft.tokens == (0, 2, 6, 1, 4)
    assert draft.parents == (-1, 0, 1, -1, 3)
    assert draft.scores == pytest.approx((0.6, 0.42, 0.378, 0.3, 0.15))
    assert levels.chain(0) == [0]


@pytest.mark.parametrize("static", [False, True])
def test_a_draft_has_the_best_of_all_candidates(static: bool) -> None:
    """Of those that weigh the same, the first."""
    generator, width, size = np.random.default_rng(7), 3, 2
    for depth in (1, 2, 4):
        rows = size * (1 + (depth - 1) * width)
        counts = [width if level == 0 else width * width for level in range(depth - 1) for _ in range(size)]
        places = [place for count in counts for place in generator.permutation(count)[:width]]
        probabilities = -np.sort(-generator.integers(1, 5, (rows, width)) / 8)
        found = Found(np.array([*range(rows * width), *places]), probabilities.astype(np.float32))
        shape = TreeShape(depth, width, prunes=True, nodes=9, static=static)
        program: Any = SimpleNamespace(shape=shape, size=size, found=found)
        for lane in range(size):
            whole, best = (Levels(program).draft(lane, budget, "test") for budget in (99, 9))
            assert len(whole) == width * (1 + (depth - 1) * width)
            weights = dict(zip(whole.tokens, static_weights(whole, width) if static else whole.scores, strict=True))
            ranked = sorted(sorted(weights), key=weights.__getitem__, reverse=True)
            assert set(best.tokens) == set(ranked[:9])


def static_weights(draft: Draft, width: int) -> list[float]:
    """By rank: the tokens of a row are numbered from the first rank on."""
    weights: list[float] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        weights.append(static_shares(width)[token % width] * (weights[parent] if parent >= 0 else 1.0))
    return weights
