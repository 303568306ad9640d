"""The match rule on hand-made logits, and the same-text promise over random models and random drafts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.sampling.draw import pick
from foredraft.sampling.verify import token_logprob, verify
from foredraft.types import NO_DRAFT, Draft, Sequence, TokenLogprob, Verdict, Work
from tests.unit.unit_helpers import make_draft, make_sequence, path_to, random_tree

VOCAB = 6
Ids = tuple[int, ...]


def saying(*tokens: int) -> Tensor:
    """One row per token, each of which the target would say greedily: [len(tokens), VOCAB]."""
    return torch.eye(VOCAB)[list(tokens)] * 9


def decoding(draft: Draft = NO_DRAFT, **params: Any) -> Work:
    """A sequence one token short of its end, as in plain decoding."""
    sequence = make_sequence([1, 2, 3], **params)
    sequence.num_computed_tokens = 2
    return Work(sequence, 1, len(draft), draft)


def judged(rows: Tensor, work: Work) -> Verdict:
    (verdict,) = verify(rows, [work])
    return verdict


class TestChains:
    def test_an_empty_draft_leaves_one_token(self) -> None:
        assert judged(saying(4), decoding()) == Verdict((), (4,), (None,))

    def test_all_right_earns_a_bonus(self) -> None:
        assert judged(saying(4, 5, 0), decoding(make_draft([4, 5]))) == Verdict((0, 1), (4, 5, 0), (None,) * 3)

    def test_a_wrong_first_token_costs_the_rest(self) -> None:
        assert judged(saying(3, 5, 0), decoding(make_draft([4, 5]))) == Verdict((), (3,), (None,))

    def test_a_wrong_second_token_is_replaced(self) -> None:
        assert judged(saying(4, 3, 0), decoding(make_draft([4, 5]))) == Verdict((0,), (4, 3), (None,) * 2)

    def test_a_token_is_not_accepted_for_appearing_later(self) -> None:
        assert judged(saying(5, 5, 5), decoding(make_draft([4, 5]))).tokens == (5,)


class TestTrees:
    #       4        5       below the last known token
    #      / \       |
    #     0   1      2
    TREE = make_draft([4, 5, 0, 1, 2], [-1, -1, 0, 0, 1])

    @pytest.mark.parametrize(
        ("target_argmax", "path", "tokens"),
        [
            ((4, 1, 9, 9, 3, 9), (0, 3), (4, 1, 3)),
            ((4, 0, 9, 3, 9, 9), (0, 2), (4, 0, 3)),
            ((5, 9, 2, 9, 9, 3), (1, 4), (5, 2, 3)),
            ((5, 9, 0, 9, 9, 9), (1,), (5, 0)),  # 0 is a child of the other branch
            ((4, 2, 9, 9, 9, 9), (0,), (4, 2)),
            ((0, 9, 9, 9, 9, 9), (), (0,)),  # 0 is in the tree, but not here
        ],
    )
    def test_the_walk_follows_the_target(
        self, target_argmax: Iterable[int], path: tuple[int, ...], tokens: tuple[int, ...]
    ) -> None:
        """Row 0 is the last known token's, row i + 1 that of node i; 9 marks rows that must not matter."""
        rows = saying(*(token % 9 for token in target_argmax))
        assert judged(rows, decoding(self.TREE)) == Verdict(path, tokens, (None,) * len(tokens))

    def test_of_equal_siblings_the_first_is_taken(self) -> None:
        draft = make_draft([4, 4, 0], [-1, -1, 1])
        assert judged(saying(4, 0, 1, 2), decoding(draft)) == Verdict((0,), (4, 0), (None,) * 2)


class TestContext:
    def test_penalties_see_the_path_of_the_node(self) -> None:
        """The target would say 4 forever; a penalty forbids what the node's own path has said, and only that."""
        draft = make_draft([4, 5, 4, 3], [-1, 0, 0, 1])
        rows = torch.tensor([[0.0, 0.0, 0.0, 1.0, 3.0, 2.0]] * 5)
        assert judged(rows, decoding(draft)).tokens == (4, 4, 4)
        assert judged(rows, decoding(draft, presence_penalty=2.0)).tokens == (4, 5, 3, 4)

    def test_repetition_counts_the_prompt_and_presence_does_not(self) -> None:
        rows = torch.tensor([[0.0, 3.0, 0.0, 0.0, 2.0, 0.0]])
        assert judged(rows, decoding(presence_penalty=2.0)).tokens == (1,)
        assert judged(rows, decoding(repetition_penalty=2.0)).tokens == (4,)

    def test_noise_is_that_of_the_position(self) -> None:
        """Each node draws with the noise of its depth, whatever its number."""
        draft = make_draft(list(range(VOCAB)) + list(range(VOCAB)), [-1] * VOCAB + list(range(VOCAB)))
        flat = torch.zeros(len(draft) + 1, VOCAB)
        work = decoding(draft, temperature=1.0, seed=5)
        drawn = [pick(flat[0], work.sequence.params, 5, 3 + depth) for depth in range(3)]
        verdict = judged(flat, work)
        assert verdict.tokens == tuple(drawn[: len(verdict.tokens)])
        assert len(verdict.tokens) == (3 if drawn[0] == drawn[1] else 2)

    def test_the_seed_matters(self) -> None:
        texts = {judged(torch.zeros(1, VOCAB), decoding(temperature=1.0, seed=seed)).tokens for seed in range(50)}
        assert texts == {(token,) for token in range(VOCAB)}


class TestBatches:
    def test_each_work_gets_its_own_rows(self) -> None:
        """Between two works stands one that only works through its prompt and asks for no logits."""
        chunk = Work(make_sequence(range(5), id=1), 3)
        works = [decoding(make_draft([4])), chunk, decoding(make_draft([5, 2]))]
        verdicts = verify(saying(4, 1, 5, 2, 3), works)
        assert [verdict.tokens for verdict in verdicts] == [(4, 1), (), (5, 2, 3)]
        assert verdicts[1] == Verdict()

    def test_rows_left_over_are_an_error(self) -> None:
        with pytest.raises(AssertionError):
            verify(saying(1, 2), [decoding()])

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_bad_numbers_end_their_own_sequence_only(self, bad: float) -> None:
        rows = saying(4, 5, 3)
        rows[1, 2] = bad
        first, second, third = verify(rows, [decoding(), decoding(), decoding()])
        assert (first.tokens, third.tokens) == ((4,), (3,))
        assert second.tokens == second.path == ()
        assert second.error is not None
        assert "not finite" in second.error

    def test_nothing_allowed_is_an_error(self) -> None:
        assert judged(torch.full((1, VOCAB), -math.inf), decoding()).error is not None

    def test_some_forbidden_is_not(self) -> None:
        rows = torch.full((1, VOCAB), -math.inf)
        rows[0, 3] = 1.0
        assert judged(rows, decoding(temperature=1.0)).tokens == (3,)

    def test_bad_numbers_on_the_accepted_path_are_an_error(self) -> None:
        rows = saying(4, 5)
        rows[1] = math.nan
        assert judged(rows, decoding(make_draft([4]))).error is not None

    def test_bad_numbers_at_a_node_that_is_not_reached_do_not_matter(self) -> None:
        """Otherwise the draft would decide about the text."""
        rows = saying(3, 5)
        rows[1] = math.nan
        assert judged(rows, decoding(make_draft([4]))).tokens == (3,)


class TestLogprobs:
    ROW = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125]).log()

    def test_are_those_of_the_model_before_penalties_and_temperature(self) -> None:
        params: dict[str, Any] = {"temperature": 0.5, "logit_bias": {3: 50.0}, "top_k": 2, "logprobs": 2}
        verdict = judged(self.ROW[None] + 7, decoding(**params))
        assert verdict.tokens == (3,)
        (logprob,) = verdict.logprobs
        assert logprob is not None
        assert logprob.token_id == 3
        assert logprob.logprob == pytest.approx(math.log(0.0625), abs=1e-6)
        assert logprob.top == pytest.approx({0: math.log(0.5), 1: math.log(0.25)}, abs=1e-6)

    def test_there_is_one_for_each_emitted_token(self) -> None:
        rows = saying(4, 5, 0)
        verdict = judged(rows, decoding(make_draft([4, 5]), logprobs=0))
        assert verdict.logprobs == tuple(
            token_logprob(row, token, 0) for row, token in zip(rows, (4, 5, 0), strict=True)
        )
        assert all(logprob is not None and logprob.top == {} for logprob in verdict.logprobs)

    def test_are_left_out_unless_queried_for(self) -> None:
        assert judged(saying(4), decoding()).logprobs == (None,)

    def test_more_than_the_vocabulary_holds_are_all(self) -> None:
        (logprob,) = judged(saying(4), decoding(logprobs=VOCAB + 1)).logprobs
        assert logprob is not None
        assert logprob.top.keys() == set(range(VOCAB))


class TestPromptLogprobs:
    PROMPT = (3, 1, 4, 1, 5, 0, 2)

    def rows(self) -> Tensor:
        return torch.randn(len(self.PROMPT) + 4, VOCAB, generator=torch.Generator().manual_seed(2))

    def chunks(self, sizes: Iterable[int], output: Ids = ()) -> tuple[list[TokenLogprob], list[Ids]]:
        """Work through prompt and output in chunks of these sizes."""
        sequence = make_sequence(self.PROMPT, output, prompt_logprobs=2)
        collected: list[TokenLogprob] = []
        emitted: list[Ids] = []
        rows = self.rows()
        for size in sizes:
            start = sequence.num_computed_tokens
            work = Work(sequence, size)
            verdict = judged(rows[start : start + size][size - work.num_logits :], work)
            collected += verdict.prompt_logprobs
            emitted.append(verdict.tokens)
            sequence.num_computed_tokens += size
        return collected, emitted

    def expected(self) -> list[TokenLogprob]:
        return [token_logprob(row, token, 2) for row, token in zip(self.rows(), self.PROMPT[1:], strict=False)]

    @pytest.mark.parametrize("sizes", [[7], [1] * 7, [3, 4], [6, 1], [1, 6], [2, 2, 2, 1]], ids=str)
    def test_do_not_depend_on_the_chunks(self, sizes: list[int]) -> None:
        """There is one for every token but the first, and only the last chunk emits."""
        collected, emitted = self.chunks(sizes)
        assert collected == self.expected()
        assert [len(tokens) for tokens in emitted] == [0] * (len(sizes) - 1) + [1]

    @pytest.mark.parametrize("sizes", [[9], [7, 2], [6, 3], [8, 1], [3, 3, 3]], ids=str)
    def test_leave_out_the_output_when_a_text_is_computed_again(self, sizes: list[int]) -> None:
        collected, emitted = self.chunks(sizes, output=(0, 0))
        assert collected == self.expected()
        assert [len(tokens) for tokens in emitted] == [0] * (len(sizes) - 1) + [1]

    def test_go_along_with_a_draft(self) -> None:
        sequence = make_sequence(self.PROMPT, prompt_logprobs=2)
        rows = torch.cat([self.rows()[:6], saying(4, 5, 0)])
        verdict = judged(rows, Work(sequence, 7, 2, make_draft([4, 5])))
        assert list(verdict.prompt_logprobs) == self.expected()
        assert verdict.tokens == (4, 5, 0)

    def test_are_left_out_unless_queried_for(self) -> None:
        work = Work(make_sequence(self.PROMPT), 7)
        assert work.num_logits == 1
        assert judged(saying(4), work).prompt_logprobs == ()


Model = Callable[[Ids], Tensor]


def random_model(seed: int, sharpness: float) -> Model:
    """Logits that are some function of the text so far, the same whenever they are asked for."""

    def logits(text: Ids) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, text)) & (2**62 - 1))
        return torch.randn(VOCAB, generator=generator) * sharpness

    return logits


def run(model: Model, sequence: Sequence, drafts: Callable[[], Draft], num_tokens: int) -> list[TokenLogprob | None]:
    """Decode with these drafts until there are at least `num_tokens`; returns the log probabilities."""
    logprobs: list[TokenLogprob | None] = []
    while sequence.num_output_tokens < num_tokens:
        text, draft = tuple(sequence.token_ids), drafts()
        nodes = [(*text, *(draft.tokens[i] for i in path_to(draft, node))) for node in range(len(draft))]
        sequence.num_computed_tokens = sequence.num_tokens - 1
        verdict = judged(torch.stack([model(text), *map(model, nodes)]), Work(sequence, 1, len(draft), draft))
        assert verdict.tokens[:-1] == tuple(draft.tokens[node] for node in verdict.path)
        assert [draft.parents[node] for node in verdict.path] == [-1, *verdict.path][: len(verdict.path)]
        sequence.token_ids += verdict.tokens
        logprobs += verdict.logprobs
    return logprobs


@given(
    seed=st.integers(0, 2**62),
    sharpness=st.sampled_from([0.0, 1.0, 5.0]),
    luck=st.sampled_from([0.0, 0.7, 1.0]),
    params=st.sampled_from(
        [
            {},
            {"temperature": 1.0},
            {"temperature": 0.7, "top_k": 3},
            {"temperature": 1.5, "top_p": 0.8, "repetition_penalty": 1.3},
            {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "min_p": 0.05},
            {"repetition_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {2: 1.5}},
        ]
    ),
)
@settings(max_examples=60)
def test_any_draft_gives_the_same_text(seed: int, sharpness: float, luck: float, params: dict[str, Any]) -> None:
    """Chains and trees, wrong ones and ones that know the future: tokens and log probabilities are the same bits."""
    model, chance = random_model(seed, sharpness), random.Random(seed)
    plain = make_sequence([1, 2], seed=seed, logprobs=2, **params)
    plain_logprobs = run(model, plain, lambda: NO_DRAFT, 16)
    guided = make_sequence([1, 2], seed=seed, logprobs=2, **params)

    def drafted_token() -> Draft:
        """A random tree in which a node continues the true text with probability `luck`, where it can."""
        tree = random_tree(chance, chance.randint(0, 6), VOCAB)
        tokens = list(tree.tokens)
        for node in range(len(tree)):
            place = guided.num_tokens + len(path_to(tree, node)) - 1
            if place < plain.num_tokens and chance.random() < luck:
                tokens[node] = plain.token_ids[place]
        return replace(tree, tokens=tuple(tokens))

    guided_logprobs = run(model, guided, drafted_token, 10)
    length = min(guided.num_tokens, plain.num_tokens)
    assert guided.token_ids[:length] == plain.token_ids[:length]
    assert guided_logprobs[: length - 2] == plain_logprobs[: length - 2]


def test_good_drafts_save_runs() -> None:
    """The property above is not vacuous: with a draft that knows the text, one run emits all of it."""
    model = random_model(3, 1.0)
    plain = make_sequence([1, 2], seed=9, temperature=1.0)
    run(model, plain, lambda: NO_DRAFT, 8)
    guided = make_sequence([1, 2], seed=9, temperature=1.0)
    drafts = iter([make_draft(plain.output_token_ids[:7])])
    run(model, guided, lambda: next(drafts), 8)
    assert guided.token_ids == plain.token_ids
