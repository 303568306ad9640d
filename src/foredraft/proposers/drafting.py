"""How a model guesses: it writes on from the text, token by token, for all sequences at once.

Under the match rule it draws with the very noise that the target will draw with, so that the two agree as often as
they can; under the other rules it samples with noise of its own and tells what it sampled from.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foredraft.engine.batch import pack
from foredraft.engine.runner import Runner
from foredraft.sampling.noise import DRAFT_STREAM, gumbel, stream_key, uniform
from foredraft.sampling.pipeline import adjust, distribution
from foredraft.sampling.verify import pick
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence, Work


@dataclass
class _Guess:
    """A chain in the making."""

    sequence: Sequence
    budget: int
    known: int  # leading tokens whose K and V the drafting model has
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)

    @property
    def is_sampled(self) -> bool:
        return self.sequence.params.acceptance != "match"


class ModelDrafter:
    """Chains of up to `k` tokens, written by a runner whose K and V lie at the same slots as the target's.

    The last guess of a chain is never run, and what the target accepted is run again with the next tokens, in one
    piece.
    """

    taps: frozenset[int] = frozenset()

    def __init__(self, name: str, runner: Runner, block_size: int, k: int, vocab_size: int) -> None:
        self.name = name
        self.num_lookahead_tokens = k
        self._runner = runner
        self._block_size = block_size
        self._vocab_size = vocab_size  # of the target: what lies beyond cannot be guessed

    def known_tokens(self, sequence: Sequence) -> int:
        """How many leading tokens of a text need not be run before guessing."""
        raise NotImplementedError

    def remember(self, sequence: Sequence) -> None:
        """All committed tokens of the text have been run."""

    def observe(self, commits: Items[Commit]) -> None:
        """Nothing to learn: a model brings itself up to date when it is asked."""

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Nothing to forget, unless a model keeps account of its texts."""

    def clear(self) -> None:
        """Nothing is learnt from a text."""

    @torch.inference_mode()
    def propose(self, sequences: Items[Sequence], budgets: Items[int]) -> list[Draft]:
        guesses = [
            _Guess(sequence, min(budget, self.num_lookahead_tokens), self.known_tokens(sequence))
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]
        while growing := [guess for guess in guesses if len(guess.tokens) < guess.budget]:
            works = [self._work(guess) for guess in growing]
            logits = self._runner.forward(pack(works, self._block_size, self._runner.backend.device)).logits
            for guess, row in zip(growing, logits, strict=True):
                if not guess.tokens:
                    self.remember(guess.sequence)
                guess.known = guess.sequence.num_tokens + len(guess.tokens)
                self._extend(guess, row[: self._vocab_size])
        return [self._draft(guess) for guess in guesses]

    def _work(self, guess: _Guess) -> Work:
        """The text with the guesses so far, as if they were committed."""
        text = [*guess.sequence.token_ids, *guess.tokens]
        params = replace(guess.sequence.params, prompt_logprobs=None)
        longer = replace(guess.sequence, token_ids=text, num_computed_tokens=guess.known, params=params)
        return Work(longer, len(text) - guess.known)

    def _extend(self, guess: _Guess, row: Tensor) -> None:
        sequence, position = guess.sequence, guess.sequence.num_tokens + len(guess.tokens)
        prompt, output = sequence.token_ids[: sequence.num_prompt_tokens], [*sequence.output_token_ids, *guess.tokens]
        logits = adjust(row, sequence.params, prompt, output)
        q = distribution(logits, sequence.params)
        if guess.is_sampled:
            # Keyed by where the draft starts: block verification looks at tokens that it then refuses, and the next
            # draft, which may come to the same position, must not meet their noise again.
            key = stream_key(sequence.seed, sequence.num_tokens, DRAFT_STREAM)
            candidates = q.nonzero().flatten()
            noise = gumbel(uniform(key, candidates + len(guess.tokens) * self._vocab_size))
            token = int(candidates[(q[candidates].log() + noise).argmax()])
            guess.q.append(q)
        else:
            token = pick(logits, sequence.params, sequence.seed, position)
        confidence = max(float(row.softmax(-1)[token]), 1e-6)
        guess.scores.append(confidence * (guess.scores[-1] if guess.scores else 1.0))
        guess.tokens.append(token)

    def _draft(self, guess: _Guess) -> Draft:
        size = len(guess.tokens)
        if not size:
            return NO_DRAFT
        q = torch.stack(guess.q) if guess.is_sampled else None
        return Draft(tuple(guess.tokens), tuple(range(-1, size - 1)), tuple(guess.scores), (self.name,) * size, q)


class AccountingDrafter(ModelDrafter):
    """A drafting model with K and V of its own, which keeps account of what it has run of each text."""

    def __init__(self, name: str, runner: Runner, block_size: int, k: int, vocab_size: int) -> None:
        super().__init__(name, runner, block_size, k, vocab_size)
        self._run: dict[int, tuple[int, int]] = {}  # sequence id -> preemptions survived, tokens run since

    def known_tokens(self, sequence: Sequence) -> int:
        """A preempted text has lost its blocks; everything before the last token is needed, so one is always left."""
        preemptions, tokens = self._run.get(sequence.id, (0, 0))
        return min(tokens, sequence.num_tokens - 1) if preemptions == sequence.counters.preemptions else 0

    def remember(self, sequence: Sequence) -> None:
        self._run[sequence.id] = (sequence.counters.preemptions, sequence.num_tokens)

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._run.pop(sequence_id, None)
