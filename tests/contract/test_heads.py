"""Served heads give the logits of the modules that were trained, for chains and trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.batch import pack
from foredraft.heads.base import CORRECTIONS
from foredraft.heads.dflash.module import DFlashModule
from foredraft.heads.dflash.serve import Corrected
from foredraft.heads.eagle.module import EagleModule
from foredraft.heads.files import read_tensors
from foredraft.heads.medusa.module import MedusaModule
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.model.candidates import NodeLogits
from foredraft.proposers.registry import ProposerChoice
from foredraft.types import Draft, Sequence, Work
from tests.backends import KERNELS
from tests.tiny_heads import DRAFT_VOCAB, random_head, save_head, tiny_config
from tests.tiny_models import VOCAB, random_model, save_model

TOKENS = [(5 * place * place + 3) % VOCAB for place in range(41)]
TREE = Draft((3, 9, 7, 1, 200), (-1, -1, 0, 1, 2), (0.5,) * 5, ("",) * 5)  # nodes level by level, as they are added
CHAIN = Draft((3, 9, 200), (-1, 0, 1), (0.5,) * 3, ("",) * 3)
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


class Target:
    """A model with a head, and what the target computes for a sequence."""

    def __init__(self, folder: Path, head: Any, place: Path, bits: int = 16, **options: Any) -> None:
        save_head(head, place, bits=bits)
        self.llm = LLM(str(folder), head=str(place), spec="off", **{"device": "cpu", **options})
        self.engine = self.llm.engine
        self.drafter = self.proposer(head.config.kind)

    def proposer(self, name: str, **options: str) -> Any:
        return self.engine.speculation.assignments.make_proposer(ProposerChoice(name, options))

    def sequence(self, tokens: list[int], id: int = 1, **fields: Any) -> Sequence:
        params = SamplingParams(**fields).resolved({})
        made = Sequence(id, "", 0, list(tokens), 1, params, seed=id, max_tokens=999)
        assert self.engine.scheduler.pool.reserve(made, len(tokens) + 32)
        self.run(made)
        return made

    def run(self, sequence: Sequence) -> None:
        """All tokens but the last."""
        sequence.num_computed_tokens = 0
        self.engine.runner.forward(pack([Work(sequence, sequence.num_tokens - 1)], self.engine.kv.block_size))
        sequence.num_computed_tokens = sequence.num_tokens - 1

    def taps(self, sequence: Sequence, layers: tuple[int, ...]) -> Tensor:
        """[1, tokens run, taps × hidden], as they lie in the cache."""
        taps, size = self.engine.runner.taps, self.engine.kv.block_size
        assert taps is not None
        slots = [sequence.block_table[at // size] * size + at % size for at in range(sequence.num_computed_tokens)]
        rows = taps.cache[slots].float().cpu().view(len(slots), len(taps.layers), -1)
        return rows[:, [taps.layers.index(layer) for layer in layers]].flatten(1)[None]

    def embeddings(self, tokens: list[int]) -> Tensor:
        decoder = self.engine.runner.decoder
        backend = self.engine.runner.backend
        return backend.embed(torch.tensor(tokens, device=backend.device), decoder.embedding).float().cpu()[None]

    def served(self, sequence: Sequence, draft: Draft) -> Tensor:
        """The logits of the last token and of every node, as a drafter asks for them: level by level."""
        model, rows = self.drafter.model, []

        def keep(logits: NodeLogits) -> None:
            """What a run gives holds until the next one."""
            rows.extend(logits.of_target(row, VOCAB).cpu() for row in range(len(logits.values)))

        known = model.num_computed(sequence)
        copy = Sequence(**{name: getattr(sequence, name) for name in Sequence.__slots__})
        copy.num_computed_tokens = known
        with torch.inference_mode():
            keep(model.logits([Work(copy, sequence.num_tokens - known)]))
            copy = Sequence(**{name: getattr(sequence, name) for name in Sequence.__slots__})
            copy.num_computed_tokens = sequence.num_tokens
            done = 0
            depths = draft.depths
            for depth in range(1, draft.depth + 1):
                end = sum(d <= depth for d in depths)
                level = Draft(draft.tokens[:end], draft.parents[:end], draft.scores[:end], draft.origin[:end])
                keep(model.logits([Work(copy, 0, draft=level, num_computed_nodes=done)]))
                done = end
        return torch.stack(rows)


def eagle_reference(head: EagleModule, target: Target, sequence: Sequence, draft: Draft) -> Tensor:
    tokens = sequence.token_ids
    h = head.fc(target.taps(sequence, head.config.taps))
    positions = torch.arange(len(tokens) - 1)[None]
    y, context = head.midlayer(target.embeddings(tokens[1:]), h, positions, [], None)
    ys, keys = {-1: y[:, -1:]}, {-1: [context]}
    logits = [head.lm_head(head.norm(y[:, -1:]))]
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        past = keys[parent]
        place = torch.tensor([[len(tokens) - 2 + draft.depths[node]]])
        mask = torch.ones(1, 1, 1, len(tokens) - 2 + draft.depths[node] + 1, dtype=torch.bool)
        ys[node], own = head.midlayer(target.embeddings([token]), ys[parent], place, past, mask)
        keys[node] = [*past, own]
        logits.append(head.lm_head(head.norm(ys[node])))
    return torch.cat(logits, 1)[0]


def medusa_reference(head: MedusaModule, target: Target, sequence: Sequence, draft: Draft) -> Tensor:
    state = head.norm(target.taps(sequence, head.config.taps)[0, -1:])
    offsets = torch.cat([head.lm_head(block(state)) for block in head.blocks])
    return offsets[[0, *draft.depths]]


def dflash_reference(head: DFlashModule, target: Target, sequence: Sequence, draft: Draft) -> Tensor:
    tokens, block = sequence.token_ids, head.config.block
    features = head.features(target.taps(sequence, head.config.taps))
    context = head.context(features, torch.arange(len(tokens) - 1)[None])
    x = head.rows(target.embeddings(tokens[-1:]), features[:, -1:])
    positions = torch.arange(len(tokens) - 1, len(tokens) - 1 + block)[None]
    mask = torch.ones(1, 1, block, len(tokens) - 1 + block, dtype=torch.bool)
    y = head.blocks(x, positions, context, mask)[0]
    previous = torch.tensor([tokens[-1], *draft.tokens])
    rows, weight = head.output(y[[0, *draft.depths]], previous)
    return rows @ weight.T


REFERENCES: dict[str, Callable[[Any, Target, Sequence, Draft], Tensor]] = {
    "eagle": eagle_reference,
    "medusa": medusa_reference,
    "dflash": dflash_reference,
}
CASES = [
    ("eagle", "none", "injected"),
    ("medusa", "none", "injected"),
    *(("dflash", correction, "injected") for correction in CORRECTIONS),
    ("dflash", "markov", "masked"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
@pytest.mark.parametrize(("kind", "correction", "rows"), CASES)
def test_served_logits_are_those_of_the_module(
    folder: Path, tmp_path: Path, kind: str, correction: str, rows: str, kernels: str, dtype: str
) -> None:
    """Of a corrected block, those of the few most probable tokens of each row."""
    head = random_head(tiny_config(kind, folder, correction, block_input=rows))
    target = Target(folder, head, tmp_path, dtype=dtype)
    compare(head, target, TOLERANCE[dtype])


@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("kind", "correction"), [("eagle", "none"), ("medusa", "none"), ("dflash", "refiner")])
def test_a_head_in_few_bits_runs_in_them(
    folder: Path, tmp_path: Path, kind: str, correction: str, bits: int, kernels: str
) -> None:
    """Unless it is told otherwise, and with the logits that the weights in the file give."""
    head = random_head(tiny_config(kind, folder, correction))
    target = Target(folder, head, tmp_path, bits, dtype="bfloat16")
    head.load_state_dict({name: t.float() for name, t in read_tensors(tmp_path, head.config).items()})
    for dtype, expected in (("auto", f"q{bits}"), ("bfloat16", "bf16")):
        target.drafter = target.proposer(kind, dtype=dtype)
        assert target.drafter.model._head.output.kinds == (expected,)
        compare(head, target, TOLERANCE["bfloat16"])


def compare(head: Any, target: Target, tolerance: float) -> None:
    sequence = target.sequence(TOKENS)
    for draft in (CHAIN, TREE):
        with torch.no_grad():
            expected = REFERENCES[head.config.kind](head, target, sequence, draft)
        for row, module_row in zip(target.served(sequence, draft), expected, strict=True):
            known = row > -torch.inf
            assert int(known.sum()) in (DRAFT_VOCAB, Corrected.SHORTLIST)
            there = torch.full((VOCAB,), -torch.inf).index_copy_(0, head.token_ids, module_row)
            assert (row - there)[known].abs().max() < tolerance * expected.std()
