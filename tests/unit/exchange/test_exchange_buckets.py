"""Which gradients travel together."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import torch

from paceline.cost.overlap import FIRST_BUCKET, buckets
from paceline.exchange.buckets import Buckets, divide

ENDED = SimpleNamespace(wait=lambda: None)
"""An operation that has ended already."""

MIB = 2**20


def weights(*sizes: int) -> list[torch.Tensor]:
    """Of so many bytes, the first layer's first."""
    return [torch.empty(size // 4) for size in sizes]


def sizes(groups: list[list[torch.Tensor]]) -> list[list[int]]:
    return [[weight.nbytes for weight in group] for group in groups]


def test_the_first_bucket_leaves_as_soon_as_it_is_worth_a_message() -> None:
    small, large = FIRST_BUCKET // 8, 2 * MIB
    found = divide(weights(small, small, large, small), capacity=8 * MIB)
    assert sizes(found) == [[small, large], [small, small]]


def test_later_buckets_are_filled() -> None:
    found = divide(weights(*[3 * MIB] * 6), capacity=8 * MIB)
    assert sizes(found) == [[3 * MIB], [3 * MIB] * 2, [3 * MIB] * 2, [3 * MIB]]


def test_a_model_that_is_smaller_than_one_message_is_one_bucket() -> None:
    assert len(divide(weights(*[1024] * 5), capacity=8 * MIB)) == 1


def test_types_do_not_mix() -> None:
    mixed = [torch.empty(8), torch.empty(8, dtype=torch.float64), torch.empty(8)]
    assert [len(group) for group in divide(mixed, capacity=8 * MIB)] == [1, 1, 1]


def test_the_cost_model_divides_as_the_exchange_does() -> None:
    for layers in ([5, 300, 2000, 700], [40, 900, 900, 10], [8000, 100], [200] * 30):
        layers = [kib * 1024 for kib in layers]
        real = [sum(group) for group in sizes(divide(weights(*layers), capacity=8 * MIB))]
        foreseen = buckets([(1.0, size) for size in reversed(layers)])
        assert [bucket.size for bucket in foreseen] == real


def test_closed_buckets_let_go_of_the_weights() -> None:
    layer = torch.nn.Linear(3, 3)
    buckets = Buckets(list(layer.parameters()), lambda flat, number: ENDED, capacity=MIB)
    layer(torch.ones(1, 3)).sum().backward()
    buckets.finish()
    weight = weakref.ref(layer.weight)
    buckets.close()
    del layer, buckets
    gc.collect()
    assert weight() is None
