"""A model that is loaded with a head, for tests that compare what the head gives with a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.batch import pack
from foredraft.heads.catalog import find_heads
from foredraft.llm import LLM
from foredraft.models.catalog import open_checkpoint
from foredraft.params import SamplingParams
from foredraft.proposers.model.candidates import NodeLogits
from foredraft.proposers.registry import ProposerChoice
from foredraft.types import Draft, Sequence, Work
from tests.tiny_models import VOCAB

TOKENS = [(5 * place * place + 3) % VOCAB for place in range(41)]
TREE = Draft((3, 9, 7, 1, 200), (-1, -1, 0, 1, 2), (0.5,) * 5, ("",) * 5)  # nodes level by level, as they are added
CHAIN = Draft((3, 9, 200), (-1, 0, 1), (0.5,) * 3, ("",) * 3)


class Target:
    """A model with a head, and what the target computes for a sequence."""

    def __init__(self, folder: Path, head: Path | str, **options: Any) -> None:
        self.llm = LLM(str(folder), head=str(head), spec="off", **{"device": "cpu", **options})
        self.engine = self.llm.engine
        (kind,) = find_heads(str(head), open_checkpoint(folder))
        self.drafter = self.proposer(kind)

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

    @property
    def output(self) -> Tensor:
        """The target's output head: [vocab, hidden]."""
        decoder, backend = self.engine.runner.decoder, self.engine.runner.backend
        width = decoder.config.hidden_size
        unit = torch.eye(width, dtype=backend.activation_dtype, device=backend.device)
        return backend.logits(unit, decoder.head).T.float().cpu()

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
