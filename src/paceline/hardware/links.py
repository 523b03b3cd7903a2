"""What joins hosts: latency, bandwidth each way and both at once, and all-reduces by size.

Every host runs `measure_links` over the same `Network` that training uses, so that what
is measured is what training will get: wire, protocol and library together.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.config.environment import rank_context
from paceline.errors import PacelineError
from paceline.exchange.network import Network
from paceline.exchange.opening import open_network
from paceline.hardware.profile import figure
from paceline.local.cores import set_threads, usable_cores
from paceline.schema import encode
from paceline.schema.machines import AllReduceCurve, CurvePoint, Link, Machines, Measured, exactly
from paceline.schema.plain import parse_json

if TYPE_CHECKING:
    from torch import Tensor

PINGS = 20
TRANSFERS = 5
"""Timed transfers per direction, after those that found how many bytes to send."""
MOST_TIMES = 15
"""Times taken of one thing when they differ."""
STEADY = 1.2
"""Upper over lower quartile of times that nothing disturbed."""
FIRST = 2**18
"""Bytes of the first transfer."""
PROBES = 2
"""Transfers that find how many bytes to send; the faster one counts."""
LONG_ENOUGH = 0.12
"""Seconds that a transfer must take: far above latencies, and above what queues can hold."""
LARGEST = 64 * 2**20
SIZES = tuple(2**power for power in (10, 14, 17, 20, 22, 24))
"""Bytes of the all-reduces, 1 KB to 16 MB."""
PATIENCE = 1.0
"""An all-reduce that would take longer than this is not measured, nor any larger one."""
POINT_SECONDS = 0.8
"""About so long one size is repeated."""
DEADLINE = 60.0
CPU_FROM = 2**20
"""Size from which the cores' work is seen through the clock's noise."""
_ALONE, _BACK, _BOTH, _END = 1, 2, 3, 0


def measure_links(
    network: Network, *, sizes: Sequence[int] = SIZES, clock: Callable[[], float] = time.monotonic
) -> Machines:
    """Links from this node to all later ones, and on the first node the all-reduce curve.

    Pairs take turns, so that none disturbs another; all nodes call it.
    """
    links = []
    for first in range(network.size):
        for second in range(first + 1, network.size):
            if network.rank == first:
                links.append(_Pair(network, second, clock).measure())
            elif network.rank == second:
                _answer(network, first)
            network.barrier("the next pair of hosts")
    curve = measure_allreduce(network, sizes=sizes, clock=clock)
    return Machines(links=tuple(links), curves=(curve,) if network.rank == 0 else ())


@dataclass
class _Pair:
    """This node and one that answers it."""

    network: Network
    peer: int
    clock: Callable[[], float]

    def measure(self) -> Link:
        latency = self.latency()
        rates = {way: self.rate(way, latency.median) for way in (_ALONE, _BACK, _BOTH)}
        self.tell(_END, 0)
        hosts = self.network.hosts
        return Link(
            first=hosts[self.network.rank],
            second=hosts[self.peer],
            latency=latency,
            forward=rates[_ALONE],
            backward=rates[_BACK],
            both=rates[_BOTH],
        )

    def tell(self, way: int, size: int) -> None:
        order = torch.tensor([way, size], dtype=torch.int64)
        self.network.send(order, self.peer).wait()

    def latency(self) -> Measured:
        """Half of what an empty transfer and its answer take."""
        times = [self.transfer(_ALONE, 0) / 2 for _ in range(PINGS + 3)][3:]
        return figure(times, f"{PINGS} small messages there and back over {self.network.backend}")

    def transfer(self, way: int, size: int) -> float:
        """Seconds from asking for a transfer until the other side has said that it is over."""
        network, peer = self.network, self.peer
        sent = torch.ones(size, dtype=torch.uint8)
        received = torch.empty(size, dtype=torch.uint8)
        begin = self.clock()
        self.tell(way, size)
        _move(network, peer, sent if way != _BACK else None, received if way != _ALONE else None)
        network.receive(torch.empty(1, dtype=torch.uint8), peer).wait()
        return self.clock() - begin

    def rate(self, way: int, latency: float) -> Measured:
        """Bytes per second, of as many bytes as take long enough to be told from latency."""
        size = FIRST
        while True:
            fastest = min(self.transfer(way, size) for _ in range(PROBES))
            if fastest >= LONG_ENOUGH or size == LARGEST:
                times = self.transfers(way, size)
                fastest = min(times)
                if fastest >= LONG_ENOUGH / 2 or size == LARGEST:
                    break  # else the machine had paused while it was probed
            # From what was seen, not by doubling alone: fast links need many bytes.
            factor = 1.2 * LONG_ENOUGH / max(fastest, 1e-4)
            size = min(LARGEST, math.ceil(size * min(16.0, max(1.5, factor))))
        rates = [size / max(1e-9, taken - 2 * latency) for taken in times]
        words = {_ALONE: "one way", _BACK: "back", _BOTH: "each way at once"}[way]
        how = f"{len(times)} times {size / 2**20:.3g} MB {words} over {self.network.backend}"
        return figure(rates, how)

    def transfers(self, way: int, size: int) -> list[float]:
        """Seconds of `TRANSFERS` transfers, of more when they differ: something disturbs them."""
        times: list[float] = []
        while not times or (len(times) < MOST_TIMES and not _is_steady(times)):
            times += [self.transfer(way, size) for _ in range(TRANSFERS)]
        return times


def _is_steady(times: Sequence[float]) -> bool:
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high < STEADY * low


def _answer(network: Network, peer: int) -> None:
    """Do what the node that measures asks for, until it says that it is done."""
    order = torch.empty(2, dtype=torch.int64)
    while True:
        network.receive(order, peer).wait()
        way, size = (int(value) for value in order)
        if way == _END:
            return
        sent = torch.ones(size, dtype=torch.uint8) if way != _ALONE else None
        received = torch.empty(size, dtype=torch.uint8) if way != _BACK else None
        _move(network, peer, sent, received)
        network.send(torch.zeros(1, dtype=torch.uint8), peer).wait()


def _move(network: Network, peer: int, sent: Tensor | None, received: Tensor | None) -> None:
    """Send, receive, or both at once; an empty tensor is not sent."""
    under_way = []
    if received is not None and received.numel():
        under_way.append(network.receive(received, peer))
    if sent is not None and sent.numel():
        under_way.append(network.send(sent, peer))
    for pending in under_way:
        pending.wait()


def measure_allreduce(
    network: Network, *, sizes: Sequence[int] = SIZES, clock: Callable[[], float] = time.monotonic
) -> AllReduceCurve:
    """Sums over all nodes by size, one after another as training does; all nodes call it."""
    points: list[CurvePoint] = []
    spent = sent = 0.0
    guess = 0.0
    for size in sizes:
        if guess > PATIENCE:
            break
        values = torch.zeros(max(1, size // 4))
        warm = _agreed(network, min(_timed_sum(network, values, clock) for _ in range(PROBES)))
        repeats = int(min(15.0, max(3.0, POINT_SECONDS / max(warm, 1e-4))))
        before = time.process_time()
        means: list[float] = []
        while not means or (len(means) < MOST_TIMES and not _is_steady(means)):
            times = [_timed_sum(network, values, clock) for _ in range(repeats)]
            means += network.total([t / network.size for t in times], "times of sums")
        if size >= CPU_FROM:
            spent += time.process_time() - before
            sent += len(means) * 2 * (network.size - 1) / network.size * values.nbytes
        how = f"{len(means)} sums one after another, mean of {network.size} hosts"
        points.append(CurvePoint(bytes=values.nbytes, seconds=figure(means, how)))
        guess = statistics.median(means) * 4
    effort = _agreed(network, spent / sent if sent else 0.0)
    slowdown, left = measure_hindrance(network, points, clock=clock)
    return AllReduceCurve(
        backend=network.backend,
        hosts=tuple(network.hosts),
        points=tuple(points),
        cpu_per_byte=exactly(effort, "processor time of the sums from 1 MB on") if sent else None,
        slowdown=slowdown,
        computing_left=left,
    )


def _timed_sum(network: Network, values: Tensor, clock: Callable[[], float]) -> float:
    begin = clock()
    network.sum(values).wait()
    return clock() - begin


def _agreed(network: Network, value: float) -> float:
    """The mean over all nodes, the same on each."""
    return network.total([value / network.size], "what to measure next")[0]


def main(names: str) -> int:
    """One host's part: `python -m paceline.hardware.links '["a", "b"]'`; prints what it found."""
    torch.set_num_threads(1)
    try:
        network = open_network(rank_context(), parse_json(names), deadline=DEADLINE)
        try:
            found = measure_links(network)
        finally:
            network.close()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    print(json.dumps(encode(found)))
    return 0


ROUNDS = 3
WINDOW = 0.3
"""Seconds of computing alone, and about so long of sums, in each round."""
LONGEST = 0.3
"""The largest sum that takes at most this long is the one that is tried."""
SIDE = 192
"""Of the matrices that are multiplied: a fraction of a millisecond, so that counting is fine."""


class Computing:
    """Keeps every usable core at work, as training does, and counts."""

    def __init__(self) -> None:
        self._counts = [0] * usable_cores()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._compute, args=(number,), name=f"paceline-load-{number}")
            for number in range(len(self._counts))
        ]

    def _compute(self, number: int) -> None:
        set_threads(1)
        values, result = torch.rand(SIDE, SIDE), torch.empty(SIDE, SIDE)
        while not self._stop.is_set():
            torch.mm(values, values, out=result)
            self._counts[number] += 1

    @property
    def count(self) -> int:
        """Multiplications so far."""
        return sum(self._counts)

    def __enter__(self) -> Computing:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def measure_hindrance(
    network: Network,
    points: Sequence[CurvePoint],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Measured, Measured]:
    """How many times as long sums take beside computing, and what part of computing is left.

    The part is that of the host that suffers most: the others wait for it. All nodes call it
    and get the same.
    """
    fitting = [point for point in points if point.seconds.median <= LONGEST] or points[:1]
    point = fitting[-1]
    repeats = max(2, min(60, round(WINDOW / max(point.seconds.median, 1e-4))))
    values = torch.zeros(max(1, point.bytes // 4))

    def sums() -> float:
        network.barrier("the next try")
        begin = clock()
        for _ in range(repeats):
            network.sum(values).wait()
        return clock() - begin

    slower, left = [], []
    for _ in range(ROUNDS):
        idle = sums()
        with Computing() as computing:
            network.barrier("computing")
            first, begin = computing.count, clock()
            time.sleep(WINDOW)
            alone = (computing.count - first) / (clock() - begin)
            network.barrier("sums beside computing")
            first, begin = computing.count, clock()
            busy = sums()
            both = (computing.count - first) / (clock() - begin)
        slower.append(_everyone(network, busy / idle))
        left.append(_everyone(network, min(1.0, both / max(alone, 1e-9))))
    how = f"{ROUNDS} times {repeats} sums of {point.bytes / 2**20:.3g} MB"
    return (
        figure([max(1.0, statistics.fmean(hosts)) for hosts in slower], f"{how}, beside computing"),
        figure([min(hosts) for hosts in left], f"{how}, the host that suffers most"),
    )


def _everyone(network: Network, value: float) -> list[float]:
    """What every node has found, on every node."""
    mine = [value if node == network.rank else 0.0 for node in range(network.size)]
    return network.total(mine, "what was found")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
