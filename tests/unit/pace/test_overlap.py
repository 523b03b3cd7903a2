"""Gradients that leave early: what is expected of a backward pass, and what leaves when."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.errors import UnsupportedError
from paceline.pace.overlap import MOST_CHANGES, Departure, Rhythm


class Arrived:
    """An operation that is done at once, as between ranks that have nothing to add."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


def hits(passes: list[tuple[int, ...]]) -> list[bool]:
    """Of every pass, whether it was expected."""
    rhythm, found = Rhythm(), []
    for reached in passes:
        found.append(rhythm.expected == reached)
        rhythm.note(reached)
    return found


def test_a_loop_that_repeats_itself_is_learnt_in_one_turn() -> None:
    judge, maker = (0, 1), (2, 3)
    assert all(hits([judge] * 10)[1:])
    once = [judge] * 5 + [maker]
    assert all(hits(once * 4)[len(once) + 1 :])


def test_a_loop_without_a_rhythm_is_remembered_within_bounds() -> None:
    chance = random.Random(1)
    rhythm = Rhythm()
    for _ in range(20 * MOST_CHANGES):
        rhythm.note((chance.randrange(1000),))
    assert len(rhythm._after) <= MOST_CHANGES


def weights(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size, requires_grad=True) for size in sizes]


def test_buckets_leave_whole_and_in_order_whoever_arrives_first() -> None:
    first, middle, last = parameters = weights(2**20 // 4, 5 * 2**20, 2**20 // 4)
    left: list[int] = []

    def start(flat: torch.Tensor, _: object) -> Arrived:
        left.append(flat.numel())
        return Arrived()

    departure = Departure(parameters, start, counts=True)
    for number, each in enumerate((first, middle, last)):
        each.grad = torch.full_like(each, number + 1.0)
        departure.arrived(each)
        assert bool(left) == (each is last)  # the last parameter's bucket is the first to leave
    assert all(each.grad is None for each in parameters)
    assert departure.finish() == {id(each) for each in parameters}
    found = {id(each): float(total.sum()) / each.numel() for each, total in departure.sums()}
    assert found == {id(first): 1.0, id(middle): 2.0, id(last): 3.0}


def test_what_does_not_arrive_counts_as_zero_and_what_comes_late_stays() -> None:
    there, missing = parameters = weights(3, 4)
    departure = Departure(parameters, lambda *_: Arrived(), counts=True)
    there.grad = torch.ones(3)
    departure.arrived(there)
    assert departure.finish() == {id(there)}
    there.grad = torch.ones(3)  # a second time, after it has left
    sums = {id(each): total.tolist() for each, total in departure.sums()}
    assert sums == {id(there): [1.0] * 3, id(missing): [0.0] * 4}
    assert there.grad is not None


def test_of_a_part_that_does_not_count_zeros_are_sent() -> None:
    (weight,) = parameters = weights(3)
    departure = Departure(parameters, lambda *_: Arrived(), counts=False)
    weight.grad = torch.full((3,), float("nan"))
    departure.arrived(weight)
    departure.finish()
    assert [total.tolist() for _, total in departure.sums()] == [[0.0] * 3]


def test_a_sparse_gradient_is_refused() -> None:
    weight, other = weights(3, 3)
    weight.grad = torch.ones(3).to_sparse()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        Departure([other, weight], lambda *_: Arrived(), counts=True).finish()
