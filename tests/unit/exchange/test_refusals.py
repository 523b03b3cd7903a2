"""Averages and mixes with a node whose weights are not finite: it is named, no other is touched."""

from __future__ import annotations

import datetime
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from torch._C._distributed_c10d import HashStore

from paceline.errors import DivergedError, PacelineError, WorkerError
from paceline.exchange.allreduce import AllReduce
from paceline.exchange.averaging import Averaging
from paceline.exchange.base import Beginning, ExchangeSetting
from paceline.exchange.gossip.hogwild import HogwildExchange
from paceline.exchange.gossip.peers import Neighbours
from paceline.exchange.network import Network
from paceline.exchange.wire import BadMessageError, check_finite
from paceline.local.finite import is_finite
from paceline.schema import ExchangeSettings, NodePlan, Plan, RankContext

HOSTS = ["host-0", "host-1"]


def on_threads(work: Callable[[int], Any]) -> list[Any]:
    """What two nodes return or raise."""
    results: list[Any] = [None, None]

    def node(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            error.__cause__ = error.__context__ = None
            results[rank] = error.with_traceback(None)  # frames would keep the network open

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300.0)
    return results


def test_a_sum_that_overflows_is_still_finite() -> None:
    assert is_finite(torch.full((10,), 3e38))
    for bad in (float("nan"), float("inf")):
        values = torch.zeros(1000)
        values[7] = bad
        assert not is_finite(values)
        with pytest.raises(BadMessageError, match="1 of 1000 are not finite"):
            check_finite(values, "weights")


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_that_are_not_finite_are_not_added_up(overlap: bool) -> None:
    """With a loss that is: the node that has them says so, and no weight is touched."""
    store = HashStore()
    weights = [torch.ones(8, requires_grad=True) for _ in range(2)]

    def work(rank: int) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=300)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        network = Network(dist.ProcessGroupGloo(store, rank, 2, options), HOSTS, backend="gloo")
        network.place = "update 3"
        exchange = AllReduce(
            ExchangeSetting(
                network=network, options=ExchangeSettings(overlap=overlap), overlap=overlap
            )
        )
        exchange.attach([weights[rank]])
        try:
            # sqrt has an infinite slope at 0 and the value 0.
            (weights[rank] - torch.tensor([0.0] * 7 + [float(rank)])).sqrt().sum().backward()
            exchange.finish()
        finally:
            exchange.close()
            network.close()

    first, second = on_threads(work)
    gc.collect()  # what exchanges and their buckets hold of each other
    assert isinstance(second, DivergedError)
    assert str(second).startswith(
        "node 1 on host-1 has a gradient in update 3 of which 1 of 8 are not finite: its training"
    )
    assert isinstance(first, PacelineError), first
    assert not isinstance(first, DivergedError)
    assert torch.isfinite(weights[0].grad).all()


def test_weights_that_are_not_finite_are_not_averaged() -> None:
    store = HashStore()
    weights = [torch.full((8,), 2.0), torch.full((8,), 4.0)]
    weights[1][3] = float("nan")

    def work(rank: int) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=300)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        network = Network(dist.ProcessGroupGloo(store, rank, 2, options), HOSTS, backend="gloo")
        try:
            exchange = Averaging(
                ExchangeSetting(network=network, options=ExchangeSettings(every=1))
            )
            exchange.attach([weights[rank]])
            exchange.before_update(1)
            exchange.after_update()
        finally:
            network.close()

    for error in on_threads(work):
        assert isinstance(error, DivergedError)
        assert str(error).startswith("the weights of host-1 are no longer finite")
    assert weights[0].tolist() == [2.0] * 8


def test_weights_that_are_not_finite_are_not_mixed() -> None:
    port = free_port()
    plan = Plan(nodes=tuple(NodePlan(host=host) for host in HOSTS), exchange="hogwild")
    options = ExchangeSettings(kind="hogwild", mix_every=1)
    weights = [torch.full((8,), 2.0), torch.full((8,), 4.0)]
    refused = threading.Event()
    news: list[str] = []

    def work(rank: int) -> None:
        context = RankContext(node=rank, nodes=2, port=port, secret="of this test alone")
        neighbours = Neighbours(context, plan, options, deadline=30.0)
        try:
            exchange = HogwildExchange(ExchangeSetting(network=neighbours, options=options))
            exchange.attach([weights[rank]])
            beginning = Beginning(
                update=0,
                named=[("w", weights[rank])],
                rest=[],
                optimizer={},
                load_optimizer=lambda state: None,
                model="a model",
            )
            exchange.start(beginning)
            assert weights[rank].tolist() == [2.0] * 8
            if rank == 1:
                weights[1][3] = float("nan")
                try:
                    for update in range(3000):
                        exchange.begin(update=update, rate=1.0, samples=1, total=2)
                        exchange.after_update()
                        time.sleep(0.1)
                finally:
                    refused.set()
            else:
                assert refused.wait(300.0)
                exchange.after_update()
                news.extend(neighbours.roll.news)
        finally:
            neighbours.close()

    first, second = on_threads(work)
    assert first is None
    assert isinstance(second, WorkerError)
    words = "node 1 on host-1 sent weights of which 1 of 8 are not finite"
    assert str(second).startswith(f"{words} (refused by host-0)")
    assert news[0].startswith(words)
    assert weights[0].tolist() == [2.0] * 8
