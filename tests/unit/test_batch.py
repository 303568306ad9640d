"""Packing works into one forward run, against a reference that walks every row's own text."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.batch import ForwardBatch, pack
from foredraft.types import NO_DRAFT, Draft, Work
from tests.unit.unit_helpers import make_draft, make_sequence, path_to, random_tree


def random_works(chance: random.Random, block_size: int) -> list[Work]:
    """Prompt chunks, single tokens and drafts, with block tables that are shuffled and partly shared."""
    works: list[Work] = []
    free = list(range(200))
    chance.shuffle(free)
    shared = [free.pop() for _ in range(3)]
    for id in range(chance.randint(1, 4)):
        prompt_logprobs = chance.choice([None, None, 1])
        prompt = [chance.randrange(50) for _ in range(chance.randint(1, 20))]
        output = [chance.randrange(50) for _ in range(chance.choice([0, 0, 5]))]
        sequence = make_sequence(prompt, output, id=id, prompt_logprobs=prompt_logprobs)
        sequence.num_computed_tokens = chance.randrange(sequence.num_tokens)
        new = chance.randint(1, sequence.num_tokens - sequence.num_computed_tokens)
        end = sequence.num_computed_tokens + new
        size = chance.randint(0, 8) if end == sequence.num_tokens else 0
        draft = random_tree(chance, size, 50) if size else NO_DRAFT
        blocks = -(-(end + size) // block_size) + chance.randint(0, 2)
        head = shared[: min(len(shared), sequence.num_computed_tokens // block_size)]
        sequence.block_table = [*head, *(free.pop() for _ in range(max(0, blocks - len(head))))]
        works.append(Work(sequence, new, size, draft))
    return works


def reference(works: list[Work], block_size: int) -> tuple[list[tuple[int, int, int, list[int]]], list[int]]:
    """Every row as (token, position, slot, slots of its keys in text order), and the rows that need logits."""
    rows: list[tuple[int, int, int, list[int]]] = []
    wanted: list[int] = []
    for work in works:
        sequence, first_row = work.sequence, len(rows)
        end = sequence.num_computed_tokens + work.num_new_tokens
        slots = [block * block_size + place for block in sequence.block_table for place in range(block_size)]
        for position in range(sequence.num_computed_tokens, end):
            rows.append((sequence.token_ids[position], position, slots[position], slots[: position + 1]))
        for node, token in enumerate(work.draft.tokens):
            keys = [*slots[:end], *(slots[end + ancestor] for ancestor in path_to(work.draft, node))]
            rows.append((token, len(keys) - 1, slots[end + node], keys))
        if sequence.params.prompt_logprobs is not None and sequence.num_computed_tokens < sequence.num_prompt_tokens:
            wanted += range(first_row, len(rows))
        elif end == sequence.num_tokens:
            wanted += range(len(rows) - 1 - len(work.draft), len(rows))
    return rows, wanted


def rows_of(batch: ForwardBatch) -> list[tuple[int, int, int, list[int]]]:
    keys = [
        row[: position + 1].tolist() for row, position in zip(batch.key_slots, batch.positions.tolist(), strict=True)
    ]
    return list(zip(batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), keys, strict=True))


def wanted_rows(batch: ForwardBatch) -> list[int]:
    return list(range(batch.num_rows)) if batch.logit_rows is None else batch.logit_rows.tolist()


@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 2, 3, 4, 16]))
@settings(max_examples=200)
def test_agrees_with_the_reference(seed: int, block_size: int) -> None:
    works = random_works(random.Random(seed), block_size)
    batch = pack(works, block_size).tensors()
    rows, wanted = reference(works, block_size)
    assert rows_of(batch) == rows
    assert wanted_rows(batch) == wanted
    assert batch.num_rows == len(rows) == sum(work.num_rows for work in works)
    assert batch.max_keys == max(len(keys) for *_, keys in rows)
    assert batch.block_size == block_size


@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 3, 16]))
@settings(max_examples=100)
def test_the_parts_say_the_same_as_the_whole(seed: int, block_size: int) -> None:
    """What native kernels read instead of `key_slots`: prefix, path and block table."""
    works = random_works(random.Random(seed), block_size)
    batch = pack(works, block_size).tensors()
    assert torch.equal(batch.prefix_lens + batch.path_lens, batch.positions + 1)
    owners = [index for index, work in enumerate(works) for _ in range(work.num_rows)]
    assert batch.sequences.tolist() == owners
    for index, work in enumerate(works):
        assert batch.block_tables[index, : len(work.sequence.block_table)].tolist() == work.sequence.block_table
    for row, (_, _, slot, keys) in enumerate(reference(works, block_size)[0]):
        path = batch.paths[row, : int(batch.path_lens[row])].tolist()
        offsets = [*range(int(batch.prefix_lens[row])), *path]
        table = batch.block_tables[owners[row]].tolist()
        assert [table[offset // block_size] * block_size + offset % block_size for offset in offsets] == keys
        assert keys[-1] == slot, "a row sees itself last"


@given(seed=st.integers(0, 2**32))
@settings(max_examples=50)
def test_beyond_its_last_key_a_row_repeats_its_own_first(seed: int) -> None:
    batch = pack(random_works(random.Random(seed), 4), 4).tensors()
    for row, position in enumerate(batch.positions.tolist()):
        beyond = batch.key_slots[row, position + 1 :]
        assert beyond.tolist() == [int(batch.key_slots[row, 0])] * len(beyond)


@pytest.mark.parametrize("seed", range(20))
def test_in_window_blocks_a_row_has_the_same_keys_elsewhere(seed: int) -> None:
    chance, size = random.Random(seed), 4
    batch = pack(random_works(chance, size), size).tensors()
    num_blocks = int(batch.block_tables.max()) + 1
    window_map = torch.tensor(chance.sample(range(num_blocks), num_blocks), dtype=torch.int32)
    found = batch.in_window_blocks(window_map)

    def moved(slots: torch.Tensor) -> torch.Tensor:
        return window_map[slots // size] * size + slots % size

    assert torch.equal(found.slots, moved(batch.slots)) and torch.equal(found.key_slots, moved(batch.key_slots))
    filled_up = replace(batch, slots=batch.slots.clone().fill_(-1), block_tables=batch.block_tables + num_blocks)
    assert set(filled_up.in_window_blocks(window_map).slots.tolist()) == {-1}, (
        "rows that are none stay so, whatever their tables"
    )


class TestByHand:
    def packed(self, draft: Draft) -> ForwardBatch:
        """Five known tokens, three of them computed, in blocks 7, 2 and 4 of four slots each."""
        sequence = make_sequence([10, 11, 12, 13, 14])
        sequence.num_computed_tokens = 3
        sequence.block_table = [7, 2, 4]
        return pack([Work(sequence, 2, len(draft), draft)], 4).tensors()

    def test_no_draft(self) -> None:
        batch = self.packed(NO_DRAFT)
        assert batch.token_ids.tolist() == [13, 14]
        assert batch.positions.tolist() == [3, 4]
        assert batch.slots.tolist() == [31, 8]
        assert batch.prefix_lens.tolist() == [4, 5]
        assert batch.path_lens.tolist() == [0, 0]
        assert batch.paths.shape == (2, 0)
        assert batch.key_slots.tolist() == [[28, 29, 30, 31, 28], [28, 29, 30, 31, 8]]
        assert wanted_rows(batch) == [1]

    def test_a_tree(self) -> None:
        """Nodes 20 and 21 are siblings; 22 follows 20. A sibling is invisible, and shares its position. What goes on
        straight is part of the prefix."""
        batch = self.packed(make_draft([20, 21, 22], [-1, -1, 0]))
        assert batch.token_ids.tolist() == [13, 14, 20, 21, 22]
        assert batch.positions.tolist() == [3, 4, 5, 5, 6]
        assert batch.slots.tolist() == [31, 8, 9, 10, 11]
        assert batch.prefix_lens.tolist() == [4, 5, 6, 5, 5]
        assert batch.paths.tolist() == [[0, 0], [0, 0], [0, 0], [6, 0], [5, 7]]
        assert batch.path_lens.tolist() == [0, 0, 0, 1, 2]
        assert batch.key_slots[2:].tolist() == [
            [28, 29, 30, 31, 8, 9, 28],
            [28, 29, 30, 31, 8, 10, 28],
            [28, 29, 30, 31, 8, 9, 11],
        ]
        assert wanted_rows(batch) == [1, 2, 3, 4]

    def test_dtypes(self) -> None:
        batch = self.packed(make_draft([20]))
        wide = (batch.token_ids, batch.positions, batch.slots, batch.logit_rows, batch.key_slots)
        narrow = (batch.sequences, batch.block_tables, batch.prefix_lens, batch.paths, batch.path_lens)
        assert {tensor.dtype for tensor in wide} == {torch.int64}
        assert {tensor.dtype for tensor in narrow} == {torch.int32}


def test_a_slot_that_was_not_reserved_is_an_error() -> None:
    """Better than writing into a block of somebody else."""
    sequence = make_sequence([1, 2, 3])
    sequence.block_table = [0]
    with pytest.raises(IndexError):
        pack([Work(sequence, 3)], 2)
