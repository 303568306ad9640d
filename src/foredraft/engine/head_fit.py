"""What a head reaches on the texts of requests, and whether it seems to belong to the model that it drafts for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from foredraft.types import Commit, Draft, Sequence

log = logging.getLogger(__name__)

_DRAFTS = 300  # after which a head is judged, once
_LEAST = 0.05  # of their first tokens: heads for this model have half of them right, and chance has next to none
_SOME = 30  # tokens at a depth, from which on the share of right ones says something

Rates = tuple[float, ...]


class HeadFit:
    """Compares the best chain of every draft of a head with what was then committed, as far as that goes, until there
    are enough to judge it. First tokens count whether or not the controller let the draft be verified."""

    def __init__(self, keep: Callable[[str, Rates], None] = lambda name, rates: None) -> None:
        """`keep` is told once what share of a head's tokens was right, by depth."""
        self.misfits: list[str] = []  # heads that do not seem to belong to the model, by the names of their proposers
        self._keep = keep
        self._judged: set[str] = set()
        self._known: Counter[tuple[str, int]] = Counter()  # by head and depth: tokens whose place was committed
        self._right: Counter[tuple[str, int]] = Counter()
        self._drafts: dict[int, list[tuple[str, Draft]]] = {}  # of this step, by sequence

    def propose(self, name: str, sequences: Iterable[Sequence], drafts: Items[Draft]) -> None:
        """What the head of a name has drafted in this step."""
        if name not in self._judged:
            for sequence, draft in zip(sequences, drafts, strict=True):
                if draft.tokens:
                    self._drafts.setdefault(sequence.id, []).append((name, draft))

    def observe(self, commits: Items[Commit]) -> None:
        """What was committed in this step."""
        if not self._drafts:
            return
        for commit in commits:
            for name, draft in self._drafts.get(commit.sequence.id, ()):
                self._compare(name, draft, commit.tokens)
        self._drafts.clear()
        for name in [name for (name, depth), count in self._known.items() if not depth and count >= _DRAFTS]:
            if name not in self._judged:
                self._judge(name)

    def _compare(self, name: str, draft: Draft, tokens: Items[int]) -> None:
        node = 0
        for depth, token in enumerate(tokens):
            self._known[name, depth] += 1
            if draft.tokens[node] != token:
                return
            self._right[name, depth] += 1
            if node not in draft.parents:
                return
            node = draft.parents.index(node)

    def _judge(self, name: str) -> None:
        self._judged.add(name)
        rates: list[float] = []
        while self._known[name, len(rates)] >= _SOME:
            rates.append(self._right[name, len(rates)] / self._known[name, len(rates)])
        self._keep(name, tuple(rates))
        if rates[0] < _LEAST:
            self.misfits.append(name)
            log.warning(
                "The %s head does not seem to belong to this model: of its first %d drafts, %d began with the right "
                "token; give the head that was published or trained for this model.",
                *(name, self._known[name, 0], self._right[name, 0]),
            )
