"""Compressed sums in buckets that change: what is kept by parameter, between two nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from test_exchange_traffic import given, together

from paceline import exchange
from paceline.exchange.base import ExchangeSetting
from paceline.exchange.compression.by_parameter import by_parameter
from paceline.exchange.compression.powersgd import FULL_UPDATES
from paceline.exchange.network import Network
from paceline.schema import ExchangeSettings

SHAPES = ((40, 30), (40,), (20, 50))
UPDATES = 90


def mean_of_sums(network: Network, compression: str, buckets: Sequence[Sequence[int]]) -> list[
    torch.Tensor
]:  # fmt: skip
    """Of the same gradients again and again, which only the first node has."""
    settings = ExchangeSettings(compression=compression, rank=1)  # type: ignore[arg-type]
    done = [0]
    way = by_parameter(settings, network, lambda: done[0])
    parameters = [torch.zeros(shape) for shape in SHAPES]
    totals = [torch.zeros(shape) for shape in SHAPES]
    counts = [0] * len(SHAPES)
    for update in range(UPDATES):
        done[0] = update
        if update == UPDATES // 2:  # as from a checkpoint
            saved, way = way.memory(), by_parameter(settings, network, lambda: done[0])
            way.restore(saved, parameters)
        members = buckets[update % len(buckets)]
        parts = [given(5 + n, parameters[n].numel()) * (network.rank == 0) for n in members]
        flat = torch.cat(parts)
        way.begin(flat, [(number, parameters[number]) for number in members]).wait()
        for number, part in zip(members, flat.split([len(p) for p in parts]), strict=True):
            totals[number] += part.view(SHAPES[number])
            counts[number] += 1
    return [total / count for total, count in zip(totals, counts, strict=True)]


@pytest.mark.parametrize(("compression", "margin"), [("bf16", 1e-3), ("powersgd", 0.35)])
@pytest.mark.parametrize("buckets", [((0, 1, 2),), ((0, 1), (2, 0), (1, 2))])
def test_errors_come_back_in_whatever_bucket(
    compression: str, margin: float, buckets: Sequence[Sequence[int]]
) -> None:
    found = together(2, lambda network: mean_of_sums(network, compression, buckets))
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        exact = given(5 + number, one.numel()).view(one.shape)
        assert torch.equal(one, other)
        assert float((one - exact).norm() / exact.norm()) < margin


@pytest.mark.parametrize("compression", ["bf16", "powersgd"])
def test_what_is_sent_in_vain_is_sent_again(compression: str) -> None:
    """A pass that was expected to reach a parameter and did not: its sum is not used."""

    def work(network: Network) -> list[torch.Tensor]:
        settings = ExchangeSettings(compression=compression, rank=2)  # type: ignore[arg-type]
        done = [0]
        way = by_parameter(settings, network, lambda: done[0])
        sums = []
        for update in range(FULL_UPDATES + 40):
            done[0] = update
            # Of one node alone: what adding up in bf16 rounds off comes back to nobody.
            flat = given(7, 600) * (update == FULL_UPDATES and network.rank == 0)
            way.begin(flat, [(0, torch.zeros(20, 30))]).wait()
            if update % 2 and network.rank == 0:
                way.give_back(0, flat)
            sums.append(flat * (update % 2 == 0))
        return sums

    sums, _ = together(2, work)
    exact = given(7, 600)
    at_once = float((sums[FULL_UPDATES] - exact).norm())
    assert at_once > 0
    assert float((sum(sums) - exact).norm()) < at_once / 10


@pytest.mark.parametrize("apart", ["loops of one's own", "train"])
def test_a_layer_that_was_not_reached_is_learnt_afterwards(apart: str) -> None:
    """Its gradient was zero when the first thin matrices were made of it."""

    def work(network: Network) -> torch.Tensor:
        settings = ExchangeSettings(compression="powersgd", rank=1)
        setting = ExchangeSetting(network=network, options=settings)
        weight = torch.nn.Parameter(torch.zeros(40, 30))
        train, done = exchange.build("allreduce", setting), [0]
        train.attach([weight])
        way = by_parameter(settings, network, lambda: done[0])
        direction = torch.outer(torch.ones(40), given(3, 30))
        found = torch.zeros(40, 30)
        for update in range(FULL_UPDATES + 6):
            done[0] = update
            reached = update > FULL_UPDATES + 1
            weight.grad = direction.clone() * reached
            if apart == "train":
                train.finish()
            else:
                way.begin(weight.grad.view(-1), [(0, weight)]).wait()
            found = weight.grad
        train.close()
        return found

    for found in together(2, work):
        assert float(found.norm()) > 1.0
