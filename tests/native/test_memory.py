"""Where packed weights lie: apart from each other, on lines of the cache, and in as few pieces as hold them."""

from __future__ import annotations

from foredraft.backends.native.weights import LINE, PIECE, WeightMemory


def test_weights_lie_apart_and_on_lines() -> None:
    memory = WeightMemory()
    sizes = (1, 64, 65, 3 * LINE, 1000, PIECE, PIECE + 1, 7)
    taken = [memory.take(size) for size in sizes]
    assert [len(one) for one in taken] == list(sizes)
    assert all(one.data_ptr() % LINE == 0 for one in taken)
    for number, one in enumerate(taken):
        one.fill_(number)
    assert all(int(one[0]) == int(one[-1]) == number for number, one in enumerate(taken))


def test_small_weights_share_a_piece() -> None:
    memory = WeightMemory()
    first, second = memory.take(100), memory.take(100)
    assert second.data_ptr() == first.data_ptr() + 2 * LINE
