"""Foredraft's proposers inside vLLM, which drafts with a class that the user names:

    speculative_config={"method": "custom_class", "model": "foredraft.integrations.vllm.SuffixProposer",
                        "num_speculative_tokens": 8}

vLLM passes the tokens of its batch, but no names of requests. A row is therefore known by its tokens: they are those of
a sequence from the last call and the tokens sampled since. A sequence without a row has ended. A request that vLLM sets
aside for a while counts as ended and comes back as a new one.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.params import SamplingParams
from foredraft.proposers.base import Proposer
from foredraft.proposers.merge import merge
from foredraft.proposers.ngram import Ngram, NgramOptions
from foredraft.proposers.suffix import Suffix
from foredraft.proposers.suffix_text import SuffixOptions
from foredraft.types import Commit, Draft, Sequence

Tokens = NDArray[np.int32]

_MOST_TOKENS = 64  # of a draft
# vLLM verifies whatever it is given, so doubtful tokens are not drafted. In exchange, a match of one token is enough
# where what followed it is sure. docs/labs/02_vllm.md explains the values.
_OPTIONS: dict[str, Any] = {"tree": "chain", "min_n": 1, "min_score": 0.39, "store_doubt": 2.0}
_PARAMS = SamplingParams().resolved({})  # vLLM does not tell the parameters of its requests


_Row = tuple[Sequence, Tokens]  # with the tokens as vLLM holds them, which compares in no time


class SuffixProposer:
    """Drafts what followed the longest known suffix, in the request itself and in earlier answers."""

    def __init__(self, vllm_config: Any) -> None:
        self.k = min(int(vllm_config.speculative_config.num_speculative_tokens), _MOST_TOKENS)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._proposers = self.proposers()
        self._rows: list[_Row] = []  # of the last call
        self._ids = count()

    def proposers(self) -> list[Proposer]:
        """Whose drafts are merged; they look at tokens only. A subclass may give other ones, or other options."""
        return [Suffix(SuffixOptions(k=self.k, **_OPTIONS))]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no model to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Tokens,
        token_ids_cpu: Tokens,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A chain of at most K draft tokens for every row; none for rows whose prompt is not computed yet.

        Row i holds `num_tokens_no_spec[i]` tokens in `token_ids_cpu[i]`, the last of them `sampled_token_ids[i]`.
        """
        earlier = dict(enumerate(self._rows))
        self._rows = []
        drafting: dict[int, Sequence] = {}  # by row
        for index, sampled in enumerate(sampled_token_ids):
            tokens = token_ids_cpu[index, : num_tokens_no_spec[index]].copy()
            before = tokens[: len(tokens) - len(sampled)]
            sequence = _take(earlier, index, before) or (self._started(before) if sampled else None)
            if sequence is not None:
                sequence.token_ids.extend(tokens[len(before) :].tolist())
                self._rows.append((sequence, tokens))
                if sampled:
                    drafting[index] = sequence
        ended = [sequence for sequence, _ in earlier.values()]
        for proposer in self._proposers:
            proposer.observe([Commit(sequence, (), (), (), "stop") for sequence in ended])
            proposer.release([sequence.id for sequence in ended])
        return [self._chain(drafting[index]) if index in drafting else [] for index in range(len(sampled_token_ids))]

    def _started(self, prompt: Tokens) -> Sequence:
        tokens = prompt.tolist()
        return Sequence(next(self._ids), "", 0, tokens, len(tokens), _PARAMS, seed=0, max_tokens=self._max_model_len)

    def _chain(self, sequence: Sequence) -> list[int]:
        room = min(self.k, self._max_model_len - sequence.num_tokens - 1)
        if room <= 0:
            return []
        drafts = [proposer.propose([sequence], [room], 0.0)[0] for proposer in self._proposers]
        return best_path(merge(drafts, room * len(drafts)))


class MergedProposer(SuffixProposer):
    """Drafts the most probable path in the merged drafts of `suffix` and `ngram`."""

    def proposers(self) -> list[Proposer]:
        return [*super().proposers(), Ngram(NgramOptions(k=self.k))]


def best_path(draft: Draft) -> list[int]:
    """From the root always to the child with the highest score: vLLM verifies chains."""
    path: list[int] = []
    node = -1
    while children := draft.children(node):
        node = max(children, key=lambda child: draft.scores[child])
        path.append(draft.tokens[node])
    return path


def _take(earlier: dict[int, _Row], index: int, tokens: Tokens) -> Sequence | None:
    """Take out the sequence of exactly these tokens: mostly from the row where it was, else from wherever it is."""
    for place in (index, *earlier):
        if place in earlier and np.array_equal(earlier[place][1], tokens):
            return earlier.pop(place)[0]
    return None
