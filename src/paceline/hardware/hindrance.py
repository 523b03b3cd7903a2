"""What computing and communicating do to each other on hosts that do both at once.

Sums travel while the backward pass computes, on the same cores: the library's own threads copy
and add, and a host that has used up its quota neither computes nor sends. How much that costs
depends on cores, quota, library and link, so it is tried instead of derived.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence

import torch

from paceline.exchange.network import Network
from paceline.hardware.profile import figure
from paceline.local.cores import set_threads, usable_cores
from paceline.schema.machines import CurvePoint, Measured

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
