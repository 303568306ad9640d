"""Several drafts as one: a trie in which every node keeps the name of the proposer that drafted it first. And drafts
without the nodes that a grammar does not allow."""

from __future__ import annotations

from collections.abc import Sequence as Items

from foredraft.types import Draft, Sequence


def merge(drafts: Items[Draft], budget: int) -> Draft:
    """The best `budget` nodes of all drafts together.

    A node's score is the highest that anybody gives it and no more than its parent's, so the best nodes are closed
    under ancestors: a child is never kept without its parent. Where drafts disagree about the next token, at most one
    is right: the less probable token counts only as far as the other is wrong.

    A sampled draft stands alone and whole: dropping some of its tokens after looking at them would bias the output.
    """
    if len(drafts) == 1 and len(drafts[0]) <= budget:
        return drafts[0]
    sampled = next((draft for draft in drafts if draft.q is not None), None)
    if sampled is not None:
        return sampled
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    origins: list[str] = []
    node_of: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    for draft in drafts:
        place: list[int] = []  # where each of the draft's nodes is in the trie
        for token, parent, score, origin in zip(draft.tokens, draft.parents, draft.scores, draft.origin, strict=True):
            above = place[parent] if parent >= 0 else -1
            node = node_of.get((above, token))
            if node is None:
                node = node_of[above, token] = len(tokens)
                tokens.append(token)
                parents.append(above)
                scores.append(score)
                origins.append(origin)
            else:
                scores[node] = max(scores[node], score)
            place.append(node)
    _settle(parents, scores, origins)
    best = sorted(range(len(tokens)), key=scores.__getitem__, reverse=True)[:budget]  # of equals the first are kept
    return Draft(tuple(tokens), tuple(parents), tuple(scores), tuple(origins)).only(sorted(best))


def _settle(parents: list[int], scores: list[float], origins: list[str]) -> None:
    """Lower the scores of nodes to what their parents and rivals leave."""
    shares: list[float] = []  # of every node, how probable it is after its parent
    best: dict[int, int] = {}  # parent -> its most probable child
    for node, (parent, score) in enumerate(zip(parents, scores, strict=True)):
        shares.append(min(1.0, score if parent < 0 else score / scores[parent]))
        if parent not in best or shares[node] > shares[best[parent]]:
            best[parent] = node
    for node, parent in enumerate(parents):
        rival, share = best[parent], shares[node]
        if rival != node and origins[rival] != origins[node]:
            share *= 1 - shares[rival]
        scores[node] = share if parent < 0 else share * scores[parent]


def pruned(draft: Draft, sequence: Sequence) -> Draft:
    """The draft without the nodes that the sequence's grammar does not allow after their paths. A sampled draft stays
    whole: it was drawn from allowed tokens, and dropping some after looking at them would bias the output."""
    if sequence.constraint is None or not draft or draft.q is not None:
        return draft
    allowed: set[int] = set()
    for leaf in set(range(len(draft))) - set(draft.parents):
        nodes = [leaf]
        while draft.parents[nodes[-1]] >= 0:
            nodes.append(draft.parents[nodes[-1]])
        path = sequence.constrained_path(draft.path_tokens(leaf))
        num_allowed = sequence.constraint.num_valid(path) - (len(path) - len(nodes))
        allowed.update(nodes[::-1][: max(0, num_allowed)])
    return draft.only(sorted(allowed))
