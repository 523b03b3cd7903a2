"""Every exchange is counted alike, update by update, on real Gloo groups of two threads."""

from __future__ import annotations

import datetime
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from paceline import exchange
from paceline.exchange.base import ExchangeSetting
from paceline.exchange.network import Network, Traffic
from paceline.observe.metrics import EXCHANGE_KEYS, exchange_counts, exchange_line, totals
from paceline.observe.recorder import make_recorder
from paceline.schema import ExchangeSettings, RankContext
from paceline.schema.events import RankSession, read_sessions

UPDATES = 3
FEATURES = 40_000


def train(folder: Path, kind: str, rank: int, store: Any) -> tuple[RankSession, Traffic]:
    """Three updates of one node as the loop does them; what was recorded, and its sum."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=300)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    network = Network(dist.ProcessGroupGloo(store, rank, 2, options), ["a", "b"], backend="gloo")
    context = RankContext(rank=rank, world_size=2, node=rank, nodes=2)
    whole = Traffic()
    with make_recorder(folder / f"rank-{rank}", context, samples_every=0) as recorder:
        network.on_wait = lambda operation, started, seconds: recorder.add(
            "exchange", started, seconds, detail=operation
        )
        settings = ExchangeSettings(kind=kind)  # type: ignore[arg-type]
        agree = exchange.build(kind, ExchangeSetting(network=network, options=settings))
        model = nn.Linear(FEATURES, 1, bias=False)
        agree.attach(list(model.parameters()))
        for update in range(UPDATES):
            recorder.update = update
            agree.before_update(1)
            if rank == 1:  # the other one waits
                time.sleep(0.05)
            model(torch.ones(1, FEATURES)).sum().backward()
            agree.finish()
            agree.after_update()
            taken = network.take()
            whole.add(taken)
            recorder.exchanged(update, taken)
        agree.close()
    network.close()
    (session,) = read_sessions(folder / f"rank-{rank}" / "events.jsonl")
    return session, whole


@pytest.mark.parametrize("kind", ["allreduce", "ring", "reduce_broadcast", "averaging"])
def test_every_exchange_says_the_same_of_each_update(kind: str, tmp_path: Path) -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: train(tmp_path, kind, rank, store), range(2)))
    for session, whole in found:
        lines = session.exchanged
        assert [line.update for line in lines] == list(range(UPDATES))
        for line in lines:
            # Two nodes: every exchange moves the weights once each way.
            assert line.bytes_sent == pytest.approx(4 * FEATURES, rel=0.01)
            assert line.bytes_received == pytest.approx(4 * FEATURES, rel=0.01)
            assert line.messages_sent >= 1
            assert line.messages_received >= 1
            assert 0 <= line.hidden_seconds <= line.seconds
        assert sum(line.bytes_sent for line in lines) == whole.bytes_sent
        assert sum(line.waited_seconds for line in lines) == pytest.approx(whole.waited, abs=1e-6)
        waits = [span for span in session.spans if span.name == "exchange"]
        assert {span.update for span in waits} == set(range(UPDATES))
        assert sum(span.seconds for span in waits) == pytest.approx(whole.waited, abs=1e-4)
    # The other one began each update only after this one had slept: no machine can be faster.
    assert found[0][1].waited > 0


def test_operations_side_by_side_are_counted_once() -> None:
    network = object.__new__(Network)
    network.__dict__.update(traffic=Traffic(), _lock=threading.Lock())
    now = time.perf_counter()
    network.count_time(seconds=3.0, ended=now)
    network.count_time(seconds=4.0, ended=now + 2.0)  # began a second after the first
    network.count_time(seconds=1.0, ended=now + 1.0)  # lay within the second
    network.count_time(seconds=0.5, ended=now + 5.0)
    taken = network.take()
    assert taken.seconds == pytest.approx(5.5)
    assert network.take().seconds == 0


def test_waiting_that_nobody_told_is_booked_at_the_end_of_its_update(tmp_path: Path) -> None:
    with make_recorder(tmp_path, RankContext(), samples_every=0) as recorder:
        recorder.exchanged(4, Traffic(bytes_sent=9, seconds=0.5, waited=0.25, told=0.125))
    (session,) = read_sessions(tmp_path / "events.jsonl")
    (span,), (line,) = session.spans, session.exchanged
    assert (span.name, span.update) == ("exchange", 4)
    assert span.seconds == pytest.approx(0.125)
    assert span.end == pytest.approx(line.time, abs=1e-3)
    assert line.hidden_seconds == 0.25


def test_the_epochs_line_and_the_runs_totals() -> None:
    one = Traffic(
        bytes_sent=10, bytes_received=20, messages_sent=1, messages_received=2, seconds=3, waited=1
    )
    two = Traffic(
        bytes_sent=30, bytes_received=20, messages_sent=3, messages_received=2, seconds=5, waited=4
    )
    summed = [a + b for a, b in zip(exchange_counts(one), exchange_counts(two), strict=True)]
    line = exchange_line(summed, 2)
    assert line == dict(zip(EXCHANGE_KEYS, (40, 40, 4, 4, 4.0, 1.5, 2.5), strict=True))
    epoch = line | {
        "epoch": 1,
        "read_seconds": 0.0,
        "update_seconds_median": 1.0,
        "seconds": 1.0,
        "images_per_second": 1.0,
    }
    assert {key: totals([epoch, epoch], open_seconds=0.0)[key] for key in EXCHANGE_KEYS} == {
        key: 2 * value for key, value in line.items()
    }
