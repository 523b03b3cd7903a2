"""What exchanges move, counted on real Gloo groups whose members are threads of this process."""

from __future__ import annotations

import datetime
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline import exchange
from paceline.errors import DeadlineError, UnsupportedError
from paceline.exchange.base import ExchangeSetting
from paceline.exchange.network import Network, Traffic
from paceline.schema import ExchangeSettings

LENGTHS = (0, 1, 3, 1000, 700_001)
"""Empty, fewer elements than nodes, even, and several segments of odd lengths."""


def together(size: int, work: Callable[[Network], Any], seconds: float = 300.0) -> list[Any]:
    """What `work` returns on each of `size` nodes."""
    store = dist.HashStore()

    def member(rank: int) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=seconds)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(store, rank, size, options)
        network = Network(group, [f"host-{n}" for n in range(size)], backend="gloo")
        try:
            return work(network)
        finally:
            network.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


def given(rank: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


def sums(kind: str, size: int) -> list[list[tuple[torch.Tensor, Traffic]]]:
    """By node: the sum of a vector of each length, and what it took."""

    def work(network: Network) -> list[tuple[torch.Tensor, Traffic]]:
        settings = ExchangeSettings(kind=kind)  # type: ignore[arg-type]
        built: Any = exchange.build(kind, ExchangeSetting(network=network, options=settings))
        results = []
        for number, length in enumerate(LENGTHS):
            flat = given(network.rank, length)
            built.sum(flat, number).wait()
            results.append((flat, network.traffic.take()))
        built.close()
        return results

    return together(size, work)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["ring", "reduce_broadcast"])
def test_every_node_has_the_same_sum(kind: str, size: int) -> None:
    found = sums(kind, size)
    for number, length in enumerate(LENGTHS):
        expected = sum(given(rank, length) for rank in range(size))
        for node in found:
            torch.testing.assert_close(node[number][0], expected)
            assert torch.equal(node[number][0], found[0][number][0])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_moves_two_parts_in_n_whatever_n(size: int) -> None:
    for node in sums("ring", size):
        for length, (_, traffic) in zip(LENGTHS, node, strict=True):
            exact = 2 * (size - 1) / size * 4 * length
            rounding = 2 * (size - 1) * 4  # chunks differ by an element of four bytes
            assert abs(traffic.bytes_sent - exact) < rounding
            assert abs(traffic.bytes_received - exact) < rounding
            assert traffic.bytes_sent % 4 == 0
            if length >= size:
                assert traffic.messages_sent >= 2 * (size - 1)
    # Nothing is lost between neighbours: all that was sent has been received.
    found = sums("ring", size)
    for number in range(len(LENGTHS)):
        taken = [node[number][1] for node in found]
        assert sum(t.bytes_sent for t in taken) == sum(t.bytes_received for t in taken)
        assert sum(t.bytes_sent for t in taken) == 2 * (size - 1) * 4 * LENGTHS[number]


@pytest.mark.parametrize("size", [2, 4])
def test_the_first_node_of_reduce_broadcast_moves_everything(size: int) -> None:
    for rank, node in enumerate(sums("reduce_broadcast", size)):
        for length, (_, traffic) in zip(LENGTHS, node, strict=True):
            times = size - 1 if rank == 0 else 1
            assert traffic.bytes_sent == traffic.bytes_received == times * 4 * length


class Listening:
    """A group, with what was asked of it."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("send", "recv"):
            self.asked.append(name)
        return getattr(self._group, name)


def posted(size: int, work: Callable[[Network], None]) -> list[list[str]]:
    """By node: the sends and receives of some work, in their order."""

    def listened(network: Network) -> list[str]:
        network.group = listening = Listening(network.group)
        work(network)
        return listening.asked

    return together(size, listened)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_is_always_ready_to_receive_before_it_sends(size: int) -> None:
    def work(network: Network) -> None:
        settings = ExchangeSettings(kind="ring")
        built: Any = exchange.build("ring", ExchangeSetting(network=network, options=settings))
        built.sum(given(network.rank, 700_001), 0).wait()
        built.close()

    for asked in posted(size, work):
        steps = 2 * (size - 1)
        each = len(asked) // (2 * steps)  # segments of a chunk
        assert asked[: 2 * each] == ["recv"] * 2 * each
        # From there on a step ahead: what comes back for a send has been asked for before it.
        for place, name in enumerate(asked):
            if name == "send":
                sent = asked[:place].count("send")
                assert asked[:place].count("recv") >= min(sent + each, steps * each)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_to_all_of_uneven_parts_receives_first(size: int) -> None:
    def rows(source: int, target: int) -> int:
        return 0 if (source, target) == (1, 0) else 1 + source + 2 * target

    def work(network: Network) -> None:
        own = network.rank
        sent_sizes = [rows(own, target) for target in range(size)]
        received_sizes = [rows(source, own) for source in range(size)]
        sent = torch.cat([torch.full((n, 5), 10.0 * own + t) for t, n in enumerate(sent_sizes)])
        received = torch.empty(sum(received_sizes), 5)
        network.all_to_all(received, sent, received_sizes, sent_sizes).wait()
        parts = torch.split(received, received_sizes)
        for source, part in enumerate(parts):
            assert torch.equal(part, torch.full((received_sizes[source], 5), 10.0 * source + own))
        traffic = network.traffic.take()
        assert traffic.bytes_sent == 20 * (sum(sent_sizes) - sent_sizes[own])
        assert traffic.bytes_received == 20 * (sum(received_sizes) - received_sizes[own])

    for asked in posted(size, work):
        assert asked == sorted(asked)  # "recv" before "send"


@pytest.mark.parametrize("kind", ["ring", "reduce_broadcast"])
def test_a_node_that_does_not_come_is_an_error_where_one_waits(kind: str) -> None:
    over = threading.Event()

    def work(network: Network) -> str:
        if network.rank == 1:
            assert over.wait(300)  # it is there, and does not come
            return ""
        try:
            return waits(network)
        finally:
            over.set()

    def waits(network: Network) -> str:
        network.place = "update 7"
        settings = ExchangeSettings(kind=kind)  # type: ignore[arg-type]
        built: Any = exchange.build(kind, ExchangeSetting(network=network, options=settings))
        first, second = (built.sum(torch.ones(10), number) for number in range(2))
        with pytest.raises(DeadlineError) as caught:
            first.wait()
        with pytest.raises(DeadlineError):  # what comes after it fails too, at once
            second.wait()
        built.close()
        return str(caught.value)

    message = together(2, work, seconds=3.0)[0]
    gc.collect()  # the errors' frames hold the groups, and those their sockets
    assert "rank 0 on host-0" in message
    assert "host-1 of update 7" in message


@pytest.mark.parametrize("kind", ["ring", "reduce_broadcast", "averaging"])
def test_compression_belongs_to_allreduce(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"kind = '{kind}': use 'allreduce'"):
        exchange.exchange_class(kind, "bf16")


def compressed(compression: str) -> tuple[list[torch.Tensor], list[int]]:
    """Gradients of many updates summed with compression on two nodes: totals, bytes by update."""
    updates = 60

    def work(network: Network) -> tuple[torch.Tensor, list[int]]:
        settings = ExchangeSettings(compression=compression, rank=1)  # type: ignore[arg-type]
        setting = ExchangeSetting(network=network, options=settings)
        built = exchange.build("allreduce", setting)
        weights = [torch.nn.Parameter(torch.zeros(40, 30)), torch.nn.Parameter(torch.zeros(40))]
        built.attach(weights)
        total, moved = torch.zeros(40, 30), []
        for _ in range(updates):
            if network.rank == 0:  # the other node has no samples
                for weight in weights:
                    weight.grad = given(5, weight.numel()).view(weight.shape).clone()
            built.finish()
            assert weights[0].grad is not None
            total += weights[0].grad
            for weight in weights:
                weight.grad = None
            moved.append(network.traffic.take().bytes_sent)
        built.close()
        return total / updates, moved

    found = together(2, work)
    assert torch.equal(found[0][0], found[1][0])
    return [mean for mean, _ in found], found[0][1]


@pytest.mark.parametrize(("compression", "margin"), [("bf16", 1e-3), ("powersgd", 0.35)])
def test_error_feedback_gives_back_what_compression_takes(compression: str, margin: float) -> None:
    """The same gradient again and again: its mean over updates comes near the exact one."""
    means, moved = compressed(compression)
    exact = given(5, 1200).view(40, 30)
    assert float((means[0] - exact).norm() / exact.norm()) < margin
    whole = (1200 + 40) * 4
    if compression == "bf16":
        assert set(moved) == {whole // 2}
    else:  # ten whole updates, then vectors of 40 and 30 for the matrix
        assert moved[:10] == [whole] * 10
        assert moved[10:] == [(40 + 30 + 40) * 4] * (len(moved) - 10)
