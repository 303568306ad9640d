"""The nouns of the engine: drafts, sequences, verdicts, commits. Plain Python, no torch.

What is made for every sequence and step is a named tuple: a large batch makes thousands of them between two runs, and a
frozen dataclass takes three times as long.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, MutableSequence
from collections.abc import Sequence as Items
from dataclasses import KW_ONLY, dataclass, field
from operator import ge
from typing import Any, Literal, NamedTuple

from foredraft.constraint import Constraint
from foredraft.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
TARGET = "target"  # the origin of a token that no proposer drafted


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of draft tokens for one sequence. In a chain every node has one child. NO_DRAFT is the empty one."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # -1 is the last committed token, and parents[i] < i
    scores: tuple[float, ...] = ()  # estimated probability that the node is reached and accepted
    origin: tuple[str, ...] = ()  # which proposer drafted the node
    q: Any = None  # [nodes, vocab]: what each sampled token was drawn from; None for deterministic drafts

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.parents) == len(self.scores) == len(self.origin):
            raise ValueError("a draft's tokens, parents, scores and origin must have one length")
        if self.parents and (min(self.parents) < -1 or any(map(ge, self.parents, range(len(self.parents))))):
            raise ValueError("a draft's parents must come before their children")

    @classmethod
    def chain(cls, tokens: Items[int], confidence: float, origin: str) -> Draft:
        """Each token follows the one before it, and is accepted with this confidence where that one was."""
        size = len(tokens)
        scores = tuple([confidence**depth for depth in range(1, size + 1)])
        return cls(tuple(tokens), tuple(range(-1, size - 1)), scores, (origin,) * size)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        return max(self.depths, default=0)

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def child(self, node: int, token: int) -> int:
        """The child of a node with this token, -1 where there is none."""
        for child, parent in enumerate(self.parents):
            if parent == node and self.tokens[child] == token:
                return child
        return -1

    def path_tokens(self, node: int) -> list[int]:
        """The tokens from the last committed one, which is not among them, down to a node."""
        return path_tokens(self.tokens, self.parents, node)

    @property
    def depths(self) -> list[int]:
        """Of every node, the number of draft tokens on its path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return depths

    def with_scores(self, scores: Items[float]) -> Draft:
        return Draft(self.tokens, self.parents, tuple(scores), self.origin, self.q)

    def only(self, nodes: list[int]) -> Draft:
        """The draft of these nodes alone, without `q`; every node needs its parent among those before it."""
        if len(nodes) == len(self.tokens) and self.q is None:
            return self
        place = {node: index for index, node in enumerate(nodes)}
        place[-1] = -1
        return Draft(
            tuple([self.tokens[node] for node in nodes]),
            tuple([place[self.parents[node]] for node in nodes]),
            tuple([self.scores[node] for node in nodes]),
            tuple([self.origin[node] for node in nodes]),
        )


NO_DRAFT = Draft()


def path_tokens(tokens: Items[int], parents: Items[int], node: int) -> list[int]:
    """The tokens of a tree from its root, which is not among them, down to a node."""
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of an emitted (or prompt) token under the model, and of the most likely alternatives."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)
    rank: int = 1  # of the token among all; the most likely one has 1


class Verdict(NamedTuple):
    """The target's answer to one sequence's draft: the accepted path, then one token of its own. `tokens` has one entry
    more than `path`, or is empty when the step did not reach the end of the known tokens."""

    path: tuple[int, ...] = ()  # accepted draft nodes, from the root down
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    target_argmax: tuple[int, ...] = ()  # the likeliest token after the last known one and after every node, if wanted
    error: str | None = None  # why this sequence cannot go on, for instance NaN logits


@dataclass(slots=True)
class Counters:
    """What a sequence has cost and gained so far; the raw material of SpecMetrics, which has some of it as it is."""

    arrival_time: float = 0.0
    first_run_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    target_runs: int = 0  # a run that only worked through the prompt emits nothing and does not count
    drafted_tokens: int = 0
    drafted_per_depth: list[int] = field(default_factory=list)  # runs whose draft reached a depth, from 1 on
    accepted_per_depth: list[int] = field(default_factory=list)  # of the same length
    drafted_by_origin: Counter[str] = field(default_factory=Counter)
    accepted_by_origin: Counter[str] = field(default_factory=Counter)
    draft_time_s: float = 0.0
    verify_time_s: float = 0.0
    saved_s: float = 0.0  # by draft tokens, against plain steps of the same batch; 0 where costs are not known
    preemptions: int = 0
    cached_tokens: int = 0
    decisions: Counter[str] = field(default_factory=Counter)  # reason -> steps: why the controller drafted or did not

    def count_step(
        self, commit: Commit, reasons: Iterable[str], begun: float, ended: float, draft_s: float, verify_s: float
    ) -> None:
        """Add a step that the sequence took part in: what it waited for and got, and why."""
        self.draft_time_s += draft_s
        self.verify_time_s += verify_s
        self.first_run_time = self.first_run_time or begun
        for reason in reasons:
            self.decisions[reason] += 1
        if commit.tokens:
            self.target_runs += 1
            self.first_token_time = self.first_token_time or ended
            self.last_token_time = ended
        if commit.draft.tokens:
            self._count_draft(commit.draft, commit.accepted)

    def _count_draft(self, draft: Draft, accepted: tuple[int, ...]) -> None:
        self.drafted_tokens += len(draft)
        self.drafted_by_origin.update(draft.origin)
        self.accepted_by_origin.update(draft.origin[node] for node in accepted)
        deepest = draft.depth
        deeper = [0] * (deepest - len(self.drafted_per_depth))
        self.drafted_per_depth += deeper
        self.accepted_per_depth += deeper
        for depth in range(deepest):
            self.drafted_per_depth[depth] += 1
        for depth in range(len(accepted)):
            self.accepted_per_depth[depth] += 1


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its output so far. There is no prefill and no decode phase: `num_computed_tokens` races
    `num_tokens`."""

    id: int
    request_id: str
    sample: int  # which of the request's n samples
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    params: SamplingParams  # resolved: no None among the sampling fields
    seed: int
    max_tokens: int  # params.max_tokens, cut to what the context holds
    _: KW_ONLY
    priority: int = 0  # lower ones run first; equal ones in order of arrival
    num_computed_tokens: int = 0
    num_lookahead_tokens: int = 0  # KV slots to hold free beyond the known tokens, for a draft
    prompt_key: int = 0  # gives every prompt noise of its own under `rejection` and `block`; 0 under `match`
    constraint: Constraint | None = None  # what its grammar allows
    block_table: MutableSequence[int] = field(default_factory=lambda: array("i"))  # numpy reads it without a loop
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    counters: Counters = field(default_factory=Counters)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def slot(self, offset: int, block_size: int) -> int:
        """Where in the cache its token at `offset` lies."""
        return self.block_table[offset // block_size] * block_size + offset % block_size

    @property
    def noise_seed(self) -> int:
        """What keys all noise of this sequence, together with the position."""
        return self.seed ^ self.prompt_key

    @property
    def adjusts_logits(self) -> bool:
        """Whether penalties, a bias or a grammar change logits before tokens are drawn."""
        return self.constraint is not None or self.params.adjusts_logits

    def constrained_path(self, path: Items[int]) -> list[int]:
        """A path behind this sequence as its constraint counts it: a draft model extends sequences by draft tokens."""
        assert self.constraint is not None
        return [*self.token_ids[self.num_prompt_tokens + self.constraint.num_accepted :], *path]

    @property
    def may_be_remembered(self) -> bool:
        """Whether a proposer may use this output for later requests. Not if coins may have been thrown for it: the
        same prompt and seed throw them again, and a draft must not know how they fall."""
        return self.params.remember and (self.params.acceptance == "match" or self.params.temperature == 0)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether this step's rows still owe log probabilities of prompt tokens."""
        return self.params.prompt_logprobs is not None and self.num_computed_tokens < self.num_prompt_tokens


class Work(NamedTuple):
    """What one sequence runs in a step: its next `num_new_tokens` known tokens, then its draft of at most
    `num_lookahead_tokens` nodes, for which slots are reserved."""

    sequence: Sequence
    num_new_tokens: int
    num_lookahead_tokens: int = 0
    draft: Draft = NO_DRAFT
    num_computed_nodes: int = 0  # leading nodes that have been run: a draft model grows its tree level by level

    def with_draft(self, draft: Draft) -> Work:
        """What `_replace` does, in a third of its time: this is done for every sequence and step."""
        return Work(self.sequence, self.num_new_tokens, self.num_lookahead_tokens, draft, self.num_computed_nodes)

    @property
    def reaches_end(self) -> bool:
        """Whether the last known token is computed in this step, so that new ones can be emitted."""
        sequence = self.sequence
        return sequence.num_computed_tokens + self.num_new_tokens == len(sequence.token_ids)

    @property
    def num_rows(self) -> int:
        return self.num_new_tokens + len(self.draft.tokens) - self.num_computed_nodes

    @property
    def num_logits(self) -> int:
        """How many of this work's rows, counted from its end, need logits."""
        # Unpacking is faster than attribute access, and this runs in every step.
        sequence, num_new_tokens, _, draft, num_computed_nodes = self
        if sequence.params.prompt_logprobs is not None and sequence.wants_prompt_logprobs:
            return self.num_rows
        if sequence.num_computed_tokens + num_new_tokens != len(sequence.token_ids):
            return 0
        return (1 if num_new_tokens else 0) + len(draft.tokens) - num_computed_nodes


class Stop(NamedTuple):
    """Where a verdict's tokens are cut, and why; `finish_reason` None means that the sequence goes on."""

    num_kept: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended the sequence
    stable: Items[int] = ()  # how much text may be shown after each kept token, where there is somebody to show it to


class Commit(NamedTuple):
    """What a step added to a sequence, after stops have cut it."""

    sequence: Sequence
    tokens: tuple[int, ...]
    origins: tuple[str, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    error: str | None = None
    draft: Draft = NO_DRAFT  # of this step, by all proposers together
    accepted: tuple[int, ...] = ()  # the nodes of the draft whose tokens are kept, from the root down
    target_argmax: tuple[int, ...] = ()  # as in Verdict
