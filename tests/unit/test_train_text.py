"""Prompts and shards of training text: evaluations stay out, and what is written is read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from foredraft.errors import InvalidModel, InvalidPrompt
from foredraft.train.batches import Batches
from foredraft.train.prompts import Excluded, read_prompts, usable_inventions
from foredraft.train.shards import Answer, Text, read_text, shard_file, write_shard
from foredraft.train.text import TextPlan
from foredraft.train.vocabulary import coverage, draft_vocabulary, frequencies


def lines(file: Path, *records: object) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_prompts_of_both_formats_come_once(tmp_path: Path) -> None:
    file = lines(tmp_path / "p.jsonl", {"turns": ["one", "more"]}, {"prompt": "two", "source": "x"}, {"prompt": "one"})
    assert read_prompts([file, file]) == ["one", "two"]
    with pytest.raises(InvalidPrompt, match=r"bad\.jsonl:1 holds no prompt"):
        read_prompts([lines(tmp_path / "bad.jsonl", {"text": "x"})])


def test_evaluation_prompts_stay_out_whatever_their_spelling(tmp_path: Path) -> None:
    long = "Tell me in a few words why the harbour of the old town was built for wooden ships and not for iron ones"
    excluded = Excluded([lines(tmp_path / "e.jsonl", {"turns": ["What is 2 + 2?", "And why?"]}, {"turns": [long]})])
    assert "what is 2+2" in excluded
    assert "  AND WHY " in excluded  # the second turn too
    assert f"Please answer. {long.upper()}!" in excluded  # held inside another prompt
    assert "Summarise: why the harbour of the old town was built for wooden ships and not for bronze" in excluded
    assert "What is 2 + 3?" not in excluded
    assert "Why was the harbour built?" not in excluded


def test_a_plan_answers_no_evaluation_prompt(tmp_path: Path) -> None:
    prompts = lines(tmp_path / "p.jsonl", *({"prompt": f"Question number {n}?"} for n in range(10)))
    evaluation = lines(tmp_path / "e.jsonl", {"turns": ["question NUMBER 3"]})
    plan = TextPlan((prompts,), (evaluation,), chunk_prompts=4)
    chunks = [list(plan.prompts_of(chunk)) for chunk in range(8)]
    assert sorted(prompt for chunk in chunks for prompt in chunk) == sorted(
        f"Question number {n}?" for n in range(10) if n != 3
    )
    assert [len(chunk) for chunk in chunks] == [4, 4, 1, 0, 0, 0, 0, 0]  # the empty ones invent theirs
    assert "Question number 3?" not in plan.prompts_again(1)


def test_inventions_that_cannot_be_used_are_dropped(tmp_path: Path) -> None:
    excluded = Excluded([lines(tmp_path / "e.jsonl", {"turns": ["Name the capital of France"]})])
    texts = [
        " What is a prime number? ",
        "Hm?",
        "what is a PRIME number",
        "name the capital of france.",
        "half \ufffd of it",
    ]
    assert usable_inventions(texts, excluded) == ["What is a prime number?"]


def test_shards_are_read_back_in_order(tmp_path: Path) -> None:
    provenance = {"target_digest": "d", "target_name": "n"}
    write_shard(shard_file(tmp_path, 1), [Answer([5], [6, 70_000], False)], 80_000, provenance)
    write_shard(shard_file(tmp_path, 0), [Answer([1, 2], [3], True), Answer([4], [4, 4], False)], 100, provenance)
    text = read_text(tmp_path, "d")
    assert text.tokens.tolist() == [1, 2, 3, 4, 4, 4, 5, 6, 70_000]
    assert text.starts.tolist() == [0, 3, 6, 9] and text.prompt_lens.tolist() == [2, 1, 1]
    assert text.greedy.tolist() == [True, False, False] and text.num_answer_tokens == 5
    with pytest.raises(InvalidModel, match=r"was written by another model \(n\)"):
        read_text(tmp_path, "other")
    with pytest.raises(InvalidModel, match="has no training text"):
        read_text(tmp_path / "nothing", "d")
    file = shard_file(tmp_path, 0)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(InvalidModel, match="is truncated or damaged"):
        read_text(tmp_path, "d")


def make_text(count: int, seed: int = 0) -> Text:
    rng = np.random.default_rng(seed)
    lengths, prompts = rng.integers(12, 200, count), rng.integers(2, 10, count)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Text(rng.integers(0, 50, starts[-1]).astype(np.uint16), starts, prompts, np.arange(count) % 2 == 0)


def doubled(text: Text) -> Text:
    """Other sequences, then those of the text."""
    more = make_text(100, seed=5)
    return Text(
        np.concatenate([more.tokens, text.tokens]),
        np.concatenate([more.starts, more.starts[-1] + text.starts[1:]]),
        np.concatenate([more.prompt_lens, text.prompt_lens]),
        np.concatenate([more.greedy, text.greedy]),
    )


def held_out_of(text: Text) -> set[tuple[int, ...]]:
    batches = Batches(text, 1024, seed=1).held_out(99)
    return {tuple(row[:n].tolist()) for batch in batches for row, n in zip(batch.tokens, batch.lengths)}


def test_batches_hold_every_sequence_once_an_epoch_and_none_that_is_held_out() -> None:
    text = make_text(300)
    batches = Batches(text, 1024, seed=1)
    held_out = held_out_of(text)
    assert 2 <= len(held_out) <= 10
    seen: list[tuple[int, ...]] = []
    stream, num_train = batches.from_step(0), len(batches._train)
    while len(seen) < num_train:
        batch = next(stream)
        assert batch.tokens.numel() <= 1024 and batch.tokens.shape[1] % 64 == 0
        seen += [tuple(row[:length].tolist()) for row, length in zip(batch.tokens, batch.lengths)]
    assert len(set(seen)) == len(seen) == num_train
    assert not held_out & set(seen)
    # More text, and in another order: what was held out stays so.
    assert held_out <= held_out_of(doubled(text))


def test_batches_continue_at_any_step() -> None:
    batches = Batches(make_text(60), 1024, seed=1)
    stream = batches.from_step(0)
    first = [next(stream).tokens.tolist() for _ in range(30)]  # several epochs
    for step in (3, 17, 29):
        assert next(batches.from_step(step)).tokens.tolist() == first[step]
    assert next(Batches(make_text(60), 1024, seed=2).from_step(0)).tokens.tolist() != first[0]


def test_the_draft_vocabulary_is_what_the_text_has_most() -> None:
    text = Text(np.array([7, 7, 7, 2, 2, 9], np.uint16), np.array([0, 6]), np.array([1]), np.array([True]))
    counts = frequencies(text, vocab_size=20)
    chosen = draft_vocabulary(counts, size=2)
    assert chosen.tolist() == [2, 7]
    assert coverage(counts, chosen) == pytest.approx(5 / 6)
    assert draft_vocabulary(counts).tolist() == list(range(20))
