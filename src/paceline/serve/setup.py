"""How a version uses the cores: batches at once, threads of each, samples of a batch; measured.

One batch per core, each in one thread, or one batch at a time in all of them. The first costs less
processor time per sample (no thread waits for another), the second answers a lone request sooner.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import ModelError
from paceline.schema.version import Version

Run = Callable[[np.ndarray], np.ndarray]
BatchRun = Callable[[list[np.ndarray]], np.ndarray]
Clock = Callable[[], float]
LARGEST_BATCH = 64
"""Samples of one batch: more gains nothing on CPUs, and the last of them would wait long."""
LONGEST_BATCH = 0.1
"""Seconds: a batch that takes longer must gain something, as every request waits for others."""
LONGEST_TRIAL = 1.0
"""Seconds: larger batches are not tried, or loading would take too long."""
NO_SLOWER = 0.9
"""A larger batch may give so many times the samples per second of the best: the rest is noise.
What must gain gives more than the best divided by this."""
LONGEST_MEASURING = 10.0
"""Seconds: what is not measured by then, on a busy machine, is not waited for."""
GROWTH = 4
"""Each batch that is tried is so many times the one before."""
BARRIER_SECONDS = 60.0
"""Only against a hang: workers begin a trial together."""
LONE_SECONDS, LONE_RUNS = 0.15, 5
"""How long and how often lone requests are tried at least."""
LONE_TURNS = 64
"""Of so many lone requests one is answered by the session that was slower."""
TRIAL_SECONDS, TRIAL_RUNS = 0.08, 3
"""How long and how often each batch is tried at least, after one run to warm up."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the cores are used."""

    workers: int
    """Batches that are computed at once."""
    threads: int
    """Threads of each."""
    batch: int
    """Samples of a batch at most."""
    samples_per_second: float
    lone_seconds: float = math.inf
    """Of a batch of one sample, while the other workers compute, too."""
    is_instant: bool = False
    """A lone sample takes so little that the event loop computes it itself."""


UNKNOWN = Setup(workers=1, threads=1, batch=1, samples_per_second=0.0)
"""Of what was not measured yet."""


def measured(
    about: Version,
    run: Run,
    pool: ThreadPoolExecutor,
    *,
    workers: int,
    threads: int,
    most: int,
    clock: Clock,
    until: float,
) -> Setup:
    """The largest batch that is no slower per sample, and the samples per second with it.

    One that takes long must be faster. Of repeated times the shortest counts: what else the machine
    does makes none shorter. Where `clock` is the processor time of the thread, others hardly count.
    No larger batch is tried after `until`, by time.perf_counter.
    """
    batch, best, lone, count = 1, 0.0, math.inf, 1
    while count <= most:
        inputs = _inputs(about, count)
        _check(about, pool.submit(run, inputs).result())
        seconds = _seconds(run, inputs, pool, workers, clock)
        lone = seconds if count == 1 else lone
        rate = count * workers / max(seconds, 1e-9)
        is_long = count > 1 and seconds > LONGEST_BATCH
        if rate >= best * (1 / NO_SLOWER if is_long else NO_SLOWER):
            batch, best = count, max(rate, best)
        elif is_long:  # a short one may have been disturbed: the next may still be as good
            break
        if seconds * GROWTH > LONGEST_TRIAL or time.perf_counter() > until:
            break
        count *= GROWTH
    return Setup(
        workers=workers, threads=threads, batch=batch, samples_per_second=best, lone_seconds=lone
    )


def lone_gain(
    about: Version, first: tuple[Run, ThreadPoolExecutor], second: tuple[Run, ThreadPoolExecutor]
) -> float:
    """How many times as fast the second answers one sample, by the clock, in turns.

    Medians: what else the machine does meets both, and is to count as it will for requests.
    """
    inputs = _inputs(about, 1)

    def seconds(run: Run) -> float:
        start = time.perf_counter()
        run(inputs)
        return time.perf_counter() - start

    times: tuple[list[float], list[float]] = ([], [])
    end = math.inf
    while len(times[0]) < LONE_RUNS or time.perf_counter() < end:
        for (run, pool), found in zip((first, second), times, strict=True):
            pool.submit(run, inputs).result()  # as after a pause: the other one took the caches
            found.append(pool.submit(seconds, run).result())
        end = min(end, time.perf_counter() + LONE_SECONDS)
    one, other = map(statistics.median, times)
    return one / max(other, 1e-9)


def _inputs(about: Version, count: int) -> np.ndarray:
    """Numbers like those of normalised data; whole numbers may be places in a table: 0 is one."""
    shape, dtype = (count, *about.signature.shape), np.dtype(about.signature.dtype)
    if dtype.kind == "f":
        return np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype, copy=False)
    return np.zeros(shape, dtype)


def _check(about: Version, outputs: np.ndarray) -> None:
    if tuple(outputs.shape[1:]) != tuple(about.output_shape):
        raise ModelError(
            f"the model gives outputs of shape {list(outputs.shape[1:])} per sample, where"
            f" version.json says {list(about.output_shape)}: export it again"
        )


def _seconds(
    run: Run, inputs: np.ndarray, pool: ThreadPoolExecutor, workers: int, clock: Clock
) -> float:
    """Of one batch, while every worker computes one."""
    barrier = threading.Barrier(workers)

    def repeat() -> float:
        barrier.wait(BARRIER_SECONDS)
        end, shortest, runs = time.perf_counter() + TRIAL_SECONDS, math.inf, 0
        while runs < TRIAL_RUNS or time.perf_counter() < end:
            start = clock()
            run(inputs)
            shortest = min(shortest, clock() - start)
            runs += 1
        return shortest

    return max(one.result() for one in [pool.submit(repeat) for _ in range(workers)])


class LoneChoice:
    """Which of two sessions answers lone requests sooner, as the machine is now.

    Threads that spin lose much where other programs have come since they were chosen, so the other
    one is tried at times.
    """

    def __init__(self) -> None:
        self._seconds = [math.inf, 0.0]
        self._turn = 0

    def next(self) -> int:
        self._turn += 1
        faster = int(self._seconds[1] <= self._seconds[0])
        return faster if self._turn % LONE_TURNS else 1 - faster

    def note(self, which: int, seconds: float) -> None:
        """How long one took; half of what is remembered is the newest."""
        before = self._seconds[which]
        self._seconds[which] = (before + seconds) / 2 if 0 < before < math.inf else seconds


def buffered(run: Run, most: int) -> BatchRun:
    """`run` for the inputs of several requests, which are put together in memory that is kept.

    Fresh memory for every batch costs a page fault for every 4 KB: for photographs more than
    reading the requests.
    """
    kept = threading.local()

    def compute(parts: list[np.ndarray]) -> np.ndarray:
        if len(parts) == 1 and parts[0].flags.aligned:  # behind a head of JSON they may not be
            return run(parts[0])
        total = sum(map(len, parts))
        if not hasattr(kept, "inputs"):
            kept.inputs = np.empty((most, *parts[0].shape[1:]), parts[0].dtype)
        inputs: Any = kept.inputs[:total]
        np.concatenate(parts, out=inputs)
        outputs = run(inputs)
        # A model may give its inputs back, which the next batch overwrites.
        return outputs.copy() if np.may_share_memory(outputs, inputs) else outputs

    return compute
