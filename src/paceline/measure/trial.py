"""One trial: build a strategy, warm it up, time some updates, take it down.

Or several strategies at once, to be timed in turns, an update each.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline import local
from paceline.data.sampler import apportion
from paceline.local.base import Job, LocalStrategy
from paceline.local.board import Arena, Board
from paceline.local.cores import divide_cores, pin, set_threads, visible_cores
from paceline.local.memory import give_back_memory, resident_mb
from paceline.schema import Candidate, RankContext
from paceline.train.parts import Parts

LONG_STEP = 1.0
"""Of updates longer than this fewer are needed to see that they are far behind."""
LONG_TURN = 10.0
"""Seconds: who was timed for longer has been timed often enough, whatever was asked for."""
SLOW_START = 1.5
"""The first update of a strategy takes up to so many times as long as later ones.

It takes its memory from the system, and the next ones some more.
"""
SETTLED = 0.1
"""An update that takes more than this part of the pages of the first one is warm-up still,"""
FEW_PAGES = 1000
"""unless they are as few as these,"""
LONGEST_WARMUP = 6
"""or there were as many updates of warm-up already."""


@dataclass(frozen=True, kw_only=True)
class TrialGround:
    """What all trials of a race share on one rank."""

    parts: Parts
    inputs: torch.Tensor
    targets: torch.Tensor
    clip_norm: float | None
    seed: int
    device: torch.device
    compile: bool = False
    local_batch_norm: bool = False
    board: Board | None = None
    arena: Arena | None = None
    cores: tuple[int, ...] = dataclasses.field(default_factory=visible_cores)

    def first(self, size: int) -> TrialGround:
        """The same with a smaller batch: its first samples."""
        return dataclasses.replace(self, inputs=self.inputs[:size], targets=self.targets[:size])

    def run(
        self, entry: Candidate, *, warmup: int, steps: int, give_up: float | None
    ) -> tuple[list[float], float | None]:
        """This rank's part of a trial: seconds of each timed update, and memory in MB."""
        _reset_peak()
        if self.arena is not None:
            self.arena.clear()
        strategy = self.build(entry)
        try:
            inputs, targets = self.part(strategy)
            times = self._time(strategy, inputs, targets, warmup, steps, give_up)
            return times, self._memory()
        finally:
            strategy.close()
            del strategy
            gc.collect()
            give_back_memory()

    def build(self, entry: Candidate) -> LocalStrategy:
        """This rank's part of a strategy, beside others that may be built already."""
        self.place(entry)
        strategy = local.build(self._job(entry))
        # A rate of zero leaves the weights as they are: trials must not diverge.
        strategy.scale_rate(0.0)
        return strategy

    def place(self, entry: Candidate) -> None:
        """Keep this rank on the cores that a candidate gives it."""
        ranks = entry.node.ranks
        rank = self.board.rank if self.board else 0
        pin(divide_cores(self.cores, ranks, rank) if ranks > 1 else self.cores)

    def _job(self, entry: Candidate) -> Job:
        ranks = entry.node.ranks
        board = self.board if ranks > 1 else None
        rank = board.rank if board else 0
        return Job(
            build_model=self.parts.build_model,
            loss=self.parts.loss,
            build_optimizer=self.parts.build_optimizer,
            elementwise=self.parts.elementwise,
            node=entry.node,
            context=RankContext(rank=rank, world_size=ranks, local_rank=rank, local_size=ranks),
            precision=entry.precision,
            memory_format=entry.memory_format,
            compile=self.compile,
            device=self.device,
            clip_norm=self.clip_norm,
            seed=self.seed,
            sample_shape=tuple(self.inputs.shape[1:]),
            sample_type=self.inputs.dtype,
            batch_size=len(self.targets),
            board=board,
            arena=self.arena if board else None,
            local_batch_norm=self.local_batch_norm,
        )

    def part(self, strategy: LocalStrategy) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = apportion(len(self.targets), [1.0] * strategy.workers, strategy.least)
        return (
            torch.split(self.inputs, sizes)[strategy.worker].clone(),
            torch.split(self.targets, sizes)[strategy.worker].clone(),
        )

    def _time(
        self,
        strategy: LocalStrategy,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        warmup: int,
        steps: int,
        give_up: float | None,
    ) -> list[float]:
        total = len(self.targets)
        times: list[float] = []
        pages: list[int] = []
        warm = 0
        while len(times) < steps:
            before, start = _pages_taken(), time.perf_counter()
            strategy.update(inputs, targets, total, len(pages))
            seconds = time.perf_counter() - start
            pages.append(_pages_taken() - before)
            if warm < warmup:
                hopeless = self._agreed(self._hopeless(seconds, give_up))
                warm = warmup if hopeless else warm + 1
            elif warm < LONGEST_WARMUP and self._anywhere(_takes_memory(pages)):
                warm += 1
            else:
                times.append(seconds)
                if self._enough(times, give_up):
                    break
        return times

    def _enough(self, times: list[float], give_up: float | None) -> bool:
        """Whether it is known well enough how long updates take."""
        # One slow update may be noise; several, or one of twice the length, are not.
        needed = 3 if times[0] < LONG_STEP else 2
        behind = give_up is not None and (
            (len(times) >= needed and min(times) > give_up) or self._hopeless(times[0], give_up)
        )
        return self._agreed(behind or sum(times) > LONG_TURN)

    @staticmethod
    def _hopeless(seconds: float, give_up: float | None) -> bool:
        """Whether a single update shows that it is far behind, even if it was the first."""
        return seconds > LONG_STEP and seconds > SLOW_START * (give_up or math.inf)

    def _agreed(self, decision: bool) -> bool:
        """What the first rank says: times differ between ranks, and all must go on or none."""
        first = self.board is None or self.board.rank == 0
        return self._anywhere(decision and first)

    def _anywhere(self, seen: bool) -> bool:
        """Whether any rank sees it."""
        if self.board is None or self.board.ranks == 1:
            return seen
        return self.board.sum([float(seen)], "trial")[0] > 0

    def _memory(self) -> float | None:
        private, shared = resident_mb()
        if self.board is None or self.board.ranks == 1:
            return private + shared
        sums = self.board.sum([private, shared if self.board.rank == 0 else 0.0], "memory")
        return sums[0] + sums[1]


def _pages_taken() -> int:
    """Pages of memory that this process has taken from the system so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _takes_memory(pages: list[int]) -> bool:
    """Whether the last of these updates took memory as a strategy does that is not warm yet."""
    return pages[-1] > max(FEW_PAGES, SETTLED * pages[0])


def _reset_peak() -> None:
    """Let the kernel forget the largest resident size so far."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak then includes earlier trials: an upper bound


@dataclass(frozen=True)
class _Built:
    strategy: LocalStrategy
    inputs: torch.Tensor
    targets: torch.Tensor
    threads: int
    """Of the calling thread, as its strategy has set them."""


class RankAlternation:
    """One rank's part of several candidates, all built, which make their updates in turns.

    A machine whose speed changes from minute to minute is the same for all of them.
    """

    def __init__(self, ground: TrialGround) -> None:
        self._ground = ground
        self._built: dict[str, _Built] = {}

    def build(self, entry: Candidate) -> None:
        """Build a candidate, cold; all are to be built before the first update of any.

        What one takes for its weights, another would miss that had kept it from update to update.
        """
        if not self._built and self._ground.arena is not None:
            self._ground.arena.clear()
        strategy = self._ground.build(entry)
        parts = self._ground.part(strategy)
        self._built[entry.name] = _Built(strategy, *parts, torch.get_num_threads())

    def update(self, entry: Candidate) -> float:
        """Seconds of one update of a candidate that is built."""
        built = self._built[entry.name]
        self._ground.place(entry)
        set_threads(built.threads)
        start = time.perf_counter()
        built.strategy.update(built.inputs, built.targets, len(self._ground.targets), 0)
        return time.perf_counter() - start

    def close(self) -> None:
        """Take all of them down."""
        for built in self._built.values():
            built.strategy.close()
        self._built.clear()
        gc.collect()
        give_back_memory()
