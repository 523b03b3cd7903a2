"""Where to cut a model into stages: a choice made from times, bytes and memory alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from paceline.errors import StrategyError


def choose_cuts(
    times: Sequence[float],
    cut_bytes: Sequence[float],
    memory: Sequence[float],
    stages: int,
    bytes_per_second: float = math.inf,
    memory_limit: float = math.inf,
) -> list[int]:
    """The first layer of every stage but the first, so that the slowest stage is fastest.

    `times[i]` is layer i's time, `memory[i]` its bytes, and `cut_bytes[i]` the bytes
    that cross, both ways together, when a stage begins with layer i (`inf` where none
    may; entry 0 is not used). With T the sum of a stage's times and b the bytes that
    cross at its two ends, a stage takes

        T + (b_in + b_out) / bytes_per_second

    because the process that computes it also sends and receives. A pipeline is as
    fast as its slowest stage, so the largest of these is made smallest, over all
    cuts whose stages each fit into `memory_limit` (dynamic programming over the
    number of stages and the last layer; layers squared times stages steps).
    Among equally fast cuts fewer bytes are preferred.

    >>> choose_cuts([1, 1, 1, 3], [0, 0, 0, 0], [0, 0, 0, 0], stages=2)
    [3]
    >>> choose_cuts([1, 1, 1, 3], [0, 0, 9, 900], [0] * 4, stages=2, bytes_per_second=90)
    [2]
    """
    count = len(times)
    if not len(cut_bytes) == len(memory) == count:
        raise ValueError("times, cut_bytes and memory must be equally long")
    if not 1 <= stages <= count:
        raise StrategyError(
            f"{count} layers cannot be cut into {stages} stages: set local.stages to"
            f" at most {count}"
        )
    elapsed, filled = (list(accumulate(each, initial=0.0)) for each in (times, memory))

    def transfer(layer: int) -> float:
        if layer in (0, count):
            return 0.0
        if math.isinf(cut_bytes[layer]):
            return math.inf
        return cut_bytes[layer] / bytes_per_second

    def stage_time(first: int, end: int) -> float:
        if filled[end] - filled[first] > memory_limit:
            return math.inf
        return elapsed[end] - elapsed[first] + transfer(first) + transfer(end)

    # best[end] = (slowest stage, bytes that cross, cuts) over all cuts of the layers before `end`
    best: list[tuple[float, float, list[int]]] = [
        (stage_time(0, end), 0.0, []) for end in range(count + 1)
    ]
    for stage in range(1, stages):
        longer: list[tuple[float, float, list[int]]] = [(math.inf, math.inf, [])] * (count + 1)
        for end in range(stage + 1, count + 1):
            for first in range(stage, end):
                slowest, total, cuts = best[first]
                entry = max(slowest, stage_time(first, end)), total + cut_bytes[first]
                if entry < longer[end][:2]:
                    longer[end] = (*entry, [*cuts, first])
        best = longer
    slowest, _, cuts = best[count]
    if math.isinf(slowest):
        raise StrategyError(_why_not(cut_bytes, stages, memory_limit, sum(memory)))
    return cuts


def _why_not(cut_bytes: Sequence[float], stages: int, limit: float, needed: float) -> str:
    allowed = sum(not math.isinf(size) for size in cut_bytes[1:])
    if allowed < stages - 1:
        return (
            f"the model can be cut in {allowed} places, which is too few for {stages} stages: set"
            f" local.stages to at most {allowed + 1}"
        )
    return (
        f"no cut into {stages} stages leaves each below {limit / 1e6:.0f} MB of the"
        f" {needed / 1e6:.0f} MB in all: set local.stages higher or workload.batch_size lower"
    )


def micro_batch_count(samples: int, wanted: int, least: int = 1) -> int:
    """How many equal micro-batches `samples` are divided into, as near to `wanted` as can be.

    The shapes between stages are fixed for an update, so all of its micro-batches
    have the same size, of `least` samples or more: the count is a divisor of `samples`, the
    largest one up to `wanted`, or where that is less than half of it, the smallest up to twice
    `wanted`.

    >>> [micro_batch_count(samples, 4) for samples in (128, 30, 125, 127, 2)]
    [4, 3, 5, 1, 2]
    >>> micro_batch_count(7, 4), micro_batch_count(7, 4, least=2)
    (7, 1)
    """
    most = max(1, samples // least)
    wanted = min(wanted, most)
    below = max(m for m in range(1, wanted + 1) if samples % m == 0)
    if 2 * below >= wanted:
        return below
    largest = min(2 * wanted, most)
    return next((m for m in range(wanted + 1, largest + 1) if samples % m == 0), below)
