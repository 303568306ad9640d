"""Served heads of others give the logits of references that follow their publishers' own code, for chains and trees."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.errors import InvalidModel
from foredraft.heads.catalog import find_heads
from foredraft.heads.dflash.serve import Corrected
from foredraft.heads.formats import open_head
from foredraft.llm import LLM
from foredraft.models.catalog import open_checkpoint
from foredraft.params import SamplingParams
from foredraft.types import Draft
from tests.backends import KERNELS
from tests.contract.test_head_state import compare_with_alone, compare_with_fresh
from tests.fuzz_configs import Fuzz
from tests.published.dflash import DFlashReference
from tests.published.layouts import LAYOUTS
from tests.published.shapes import BlockReference, OffsetReference, PathReference, Reference, TargetShape
from tests.served_heads import CHAIN, TOKENS, TREE, Target
from tests.tiny_models import VOCAB, random_model, save_model

LAYERS = 8
MOST_ROWS = 8  # of a block
TOLERANCE = 1e-4
REFUSED = {  # with a sentence that says
    "dflash/zlab-sliding-both-ways": "sliding window",
    "dflash/zlab-use-swa": "sliding window",
    "dflash/speculators-sliding": "sliding window",
    "gguf/dflash-sliding": "sliding window",
    "eagle1/speculators-layernorms": "layernorms is true",
    # These bring their own target (test_mtp.py).
    **{name: "" for name in LAYOUTS if name.startswith("mtp/") and name != "mtp/speculators"},
}
SERVED = sorted(LAYOUTS.keys() - REFUSED)


class Model:
    """A tiny target, and what a head may read of it, computed by transformers."""

    def __init__(self, folder: Path) -> None:
        model = random_model("llama", num_hidden_layers=LAYERS)
        self.folder, config = save_model(model, folder), model.config
        self.shape = TargetShape(
            hidden=config.hidden_size,
            vocab=VOCAB,
            layers=LAYERS,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
        )
        weights = (model.model.embed_tokens.weight, model.lm_head.weight, model.model.norm.weight)
        self.weights = [weight.detach() for weight in weights]
        self.streams: list[Tensor] = []
        hooks = [layer.register_forward_pre_hook(self._keep) for layer in [*model.model.layers, model.model.norm]]
        with torch.inference_mode():
            model(torch.tensor([TOKENS[:-1]]))
        for hook in hooks:
            hook.remove()

    def _keep(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        self.streams.append(inputs[0][0].clone())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("tiny"))


def paths_of(draft: Draft) -> list[list[int]]:
    """The tokens of a draft up to its root, and up to each of its nodes."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return paths


def up_to(draft: Draft, depth: int) -> Draft:
    """The nodes of a draft that lie no deeper; they come level by level."""
    count = sum(each <= depth for each in draft.depths)
    return Draft(draft.tokens[:count], draft.parents[:count], draft.scores[:count], draft.origin[:count])


def expected_logits(reference: Reference, streams: list[Tensor], path: list[int]) -> Tensor:
    """[vocab]: what follows the tokens and a path."""
    if isinstance(reference, OffsetReference):
        return reference.offset_logits(streams, TOKENS)[len(path)]
    if isinstance(reference, BlockReference):
        previous = [TOKENS[-1], *path]
        rows = reference.block_logits(streams, TOKENS, [*previous, *[0] * MOST_ROWS])
        return rows[len(path)]
    assert isinstance(reference, PathReference)
    return reference.path_logits(streams, TOKENS, path)[-1]


def compare(name: str, model: Model, place: Path, tolerance: float, **options: Any) -> None:
    """Of a corrected block, those of the few most probable tokens of each row."""
    LAYOUTS[name].write(place, model.shape, 7)
    reference = LAYOUTS[name].reference(place, model.shape, *model.weights)
    target = Target(model.folder, next(place.glob("*.gguf"), place), dtype="float32", **options)
    sequence = target.sequence(TOKENS)
    deepest = MOST_ROWS if isinstance(reference, PathReference) else target.drafter.shape.depth - 1
    for draft in (up_to(CHAIN, deepest), up_to(TREE, deepest)):
        for row, path in zip(target.served(sequence, draft), paths_of(draft), strict=True):
            expected = expected_logits(reference, model.streams, path)
            known = row.isfinite()
            is_short = int(known.sum()) == Corrected.SHORTLIST and "dspark" in name and len(path) > 0
            assert torch.equal(known, expected.isfinite()) or is_short
            assert (row - expected)[known].abs().max() < tolerance * expected[known].std()


@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
@pytest.mark.parametrize("name", SERVED)
def test_served_logits_are_those_of_the_publisher(name: str, kernels: str, model: Model, tmp_path: Path) -> None:
    compare(name, model, tmp_path, TOLERANCE)


DSPARK = ["dflash/speculators-dspark", "dflash/deepspec-dspark", "dflash/deepspec-dspark-gated"]


@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
@pytest.mark.parametrize("name", DSPARK)
def test_what_a_head_is_confident_of_scales_its_candidates(
    name: str, kernels: str, model: Model, tmp_path: Path
) -> None:
    LAYOUTS[name].write(tmp_path, model.shape, 7)
    reference = LAYOUTS[name].reference(tmp_path, model.shape, *model.weights)
    assert isinstance(reference, DFlashReference)
    target = Target(model.folder, tmp_path, dtype="float32")
    sequence = target.sequence(TOKENS, temperature=0)
    (draft,) = target.proposer("dflash", tree="chain").propose([sequence], [MOST_ROWS], 0.0)
    confidence = reference.block_confidence(model.streams, TOKENS, [TOKENS[-1], *draft.tokens])
    assert len(draft) == len(confidence) and 0.05 < confidence.min() < confidence.max() < 0.98
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"enable_confidence_head": False}))
    other = Target(model.folder, tmp_path, dtype="float32")
    same, unsure = other.sequence(TOKENS, temperature=0), other.proposer("dflash", tree="chain")
    (plain,) = unsure.propose([same], [MOST_ROWS], 0.0)
    assert plain.tokens == draft.tokens
    expected = [score * float(sure) for score, sure in zip(plain.scores, confidence.cumprod(0), strict=True)]
    assert draft.scores == pytest.approx(expected, rel=1e-3)
    # A chain ends where going on is not worth it.
    between = (expected[1] * plain.scores[1]) ** 0.5
    (short,) = target.proposer("dflash", tree="chain").propose([sequence], [MOST_ROWS], between)
    (long,) = unsure.propose([same], [MOST_ROWS], between)
    assert 1 <= len(short) < len(long)


@pytest.mark.parametrize("name", sorted(name for name, sentence in REFUSED.items() if sentence))
def test_what_is_not_supported_is_refused_with_a_sentence(name: str, model: Model, tmp_path: Path) -> None:
    LAYOUTS[name].write(tmp_path, model.shape, 7)
    with pytest.raises(InvalidModel, match=REFUSED[name]) as error:
        open_head(next(tmp_path.glob("*.gguf"), tmp_path), open_checkpoint(model.folder))
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize(
    "name", ["eagle3/nvidia", "eagle3/speculators-3.1", "eagle3/peagle", "dflash/zlab", "medusa/new", "eagle1/eagle1"]
)
def test_texts_are_those_without_speculation(name: str, dtype: str, model: Model, tmp_path: Path) -> None:
    """In every precision, greedy and sampled, and some drafts are made."""
    LAYOUTS[name].write(tmp_path, model.shape, 7)
    llm = LLM(str(model.folder), head=str(tmp_path), spec="off", dtype=dtype, device="cpu")
    (kind,) = find_heads(str(tmp_path), open_checkpoint(model.folder))
    prompts = [TOKENS[:20], TOKENS[5:30], TOKENS[:1]]
    for params in (
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1, seed=3),
    ):
        plain, drafted = (llm.generate(prompts, params, spec=spec) for spec in ("off", kind))
        assert [output.token_ids for output in plain] == [output.token_ids for output in drafted]
        assert all(output.metrics.drafted_tokens > 0 for output in drafted)


# Targets with windows, or whose rows choose experts. Their layers give distinct taps.
OTHER_TARGETS: dict[str, dict[str, Any]] = {"gemma3": {}, "gpt-oss": {}, "qwen3-moe": {"num_hidden_layers": 8}}


@pytest.mark.parametrize("kind", OTHER_TARGETS)
def test_texts_over_other_targets_are_those_without_speculation(kind: str, tmp_path: Path) -> None:
    """The windows are shorter than the prompts, so that drafts are verified behind keys that are gone."""
    model = random_model(kind, **OTHER_TARGETS[kind])
    folder, config = save_model(model, tmp_path / "model"), model.config
    shape = TargetShape(hidden=config.hidden_size, vocab=VOCAB, layers=config.num_hidden_layers)
    for name, spec in (("eagle3/speculators", "eagle"), ("dflash/speculators", "dflash")):
        LAYOUTS[name].write(tmp_path / spec, shape, 7)
    prompts, params = [TOKENS, TOKENS[5:35]], SamplingParams(max_tokens=8, ignore_eos=True)
    llm = LLM(str(folder), head=str(tmp_path), spec="off", dtype="bfloat16", device="cpu")
    plain, *others = (llm.generate(prompts, params, spec=spec) for spec in ("off", "eagle", "dflash"))
    for drafted in others:
        assert [output.token_ids for output in plain] == [output.token_ids for output in drafted]
        assert all(output.metrics.drafted_tokens > 0 for output in drafted)


@pytest.mark.parametrize("name", ["eagle3/peagle", "eagle3/speculators-whole-vocabulary", "dflash/zlab-causal"])
def test_drafts_are_those_of_a_fresh_engine(name: str, model: Model, tmp_path: Path) -> None:
    LAYOUTS[name].write(tmp_path, model.shape, 7)
    (kind,) = find_heads(str(tmp_path), open_checkpoint(model.folder))
    compare_with_fresh(model.folder, str(tmp_path), kind, 0.8)
    compare_with_alone(model.folder, str(tmp_path), kind)


def test_a_changed_config_is_read_or_refused_with_a_sentence(tmp_path: Path) -> None:
    """`make fuzz WHAT=configs` tries more, and drafts with all that are read."""
    fuzz = Fuzz(tmp_path)
    found = [fuzz.judge(0, index, drafts=False) for index in range(4 * len(fuzz.heads))]
    outcomes = Counter(outcome for outcome, _ in found)
    assert [detail for outcome, detail in found if outcome == "failed"] == []
    assert outcomes["refused"] > len(fuzz.heads) and outcomes["loaded"] > len(fuzz.heads) // 2
