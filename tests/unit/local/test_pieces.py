"""Pieces of the weights: every element in exactly one, aligned, of nearly equal size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.local.pieces import divide

SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=12)
UNIT = 16  # floats in a cache line


@given(sizes=SIZES, ranks=st.integers(1, 9))
def test_every_element_belongs_to_exactly_one_rank(sizes: list[int], ranks: int) -> None:
    named = [(f"layer{i}", size) for i, size in enumerate(sizes)]
    divided = divide(named, ranks)
    assert len(divided) == ranks
    owners = {name: [0] * size for name, size in named}
    for parts in divided:
        for piece in parts:
            assert piece.start < piece.end
            for index in range(piece.start, piece.end):
                owners[piece.name][index] += 1
    assert all(set(counts) == {1} for counts in owners.values())


@given(sizes=SIZES, ranks=st.integers(1, 9))
def test_cuts_lie_on_cache_lines_and_parts_are_equal(sizes: list[int], ranks: int) -> None:
    named = [(f"layer{i}", size) for i, size in enumerate(sizes)]
    starts = {}
    at = 0
    for name, size in named:
        starts[name] = at
        at += size
    totals = []
    for parts in divide(named, ranks):
        totals.append(sum(piece.end - piece.start for piece in parts))
        if parts:
            assert (starts[parts[0].name] + parts[0].start) % UNIT == 0
    assert max(totals) - min(totals) <= 2 * UNIT


@given(sizes=SIZES, ranks=st.integers(1, 9), kept=st.integers(0, 11))
def test_what_is_to_stay_whole_is_one_piece(sizes: list[int], ranks: int, kept: int) -> None:
    named = [(f"layer{i}", size) for i, size in enumerate(sizes)]
    name, size = named[kept % len(named)]
    pieces = [piece for parts in divide(named, ranks, whole=[name]) for piece in parts]
    assert [(p.start, p.end) for p in pieces if p.name == name] == [(0, size)]
    assert sum(p.end - p.start for p in pieces) == sum(sizes)


def test_fewer_elements_than_ranks_leaves_some_with_nothing() -> None:
    divided = divide([("bias", 3)], 4)
    assert sum(len(parts) for parts in divided) == 1
