"""What compression carries from update to update: names, sizes, whose it is. No network."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from paceline.exchange.buckets import Buckets
from paceline.exchange.memory import errors_named, errors_of, of_node

ENDED = SimpleNamespace(wait=lambda: None)
"""An operation that has ended already."""


def buckets(*sizes: int) -> Buckets:
    weights = [torch.zeros(size, requires_grad=True) for size in sizes]
    return Buckets(weights, lambda flat, number: ENDED, capacity=4 * 10)


def test_errors_come_back_where_buckets_are_the_same() -> None:
    # From the last weight to the first: 6 alone, then 8 and 2 together.
    saved = errors_named({0: torch.ones(6), 1: torch.full((10,), 2.0)})
    found = errors_of(saved, buckets(2, 8, 6))
    assert [float(found[number].sum()) for number in (0, 1)] == [6.0, 20.0]
    found[0].zero_()
    assert float(saved["error-0"].sum()) == 6.0
    assert errors_of(saved, buckets(2, 9, 6)) == {}
    assert errors_of({}, buckets(2, 8, 6)) == {}


def test_every_node_gets_its_own() -> None:
    entries = {"0/error-0": 1, "1/error-0": 2, "10/error-0": 3}
    assert of_node(entries, 1) == {"error-0": 2}
    assert of_node(entries, 2) == {}
