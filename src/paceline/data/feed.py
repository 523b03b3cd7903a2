"""Batches for one worker, read ahead while the model computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from paceline.data.base import Source
from paceline.data.sampler import GlobalSampler, apportion

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One worker's part of one global batch."""

    inputs: torch.Tensor
    targets: torch.Tensor
    count: int
    """Samples in this part."""
    total: int
    """Samples in the global batch that it belongs to."""
    read_seconds: float
    """What fetching took, ahead of time or not."""
    wait_seconds: float
    """How long the training loop stood still for it."""


@dataclass(frozen=True, kw_only=True)
class Feed:
    """One worker's way through the training data."""

    source: Source
    sampler: GlobalSampler
    shares: Sequence[float]
    """Relative size of every worker's part."""
    worker: int
    least: int = 1
    """Fewest samples of a part that has any."""
    augment: bool = True
    reads_inputs: bool = True
    """False for a worker that gets its inputs from another one and needs targets only."""
    ahead: int = 2
    """Batches that are read before they are asked for."""

    def epoch(self, epoch: int, first_step: int = 0) -> Generator[Batch]:
        """The batches of an epoch, from `first_step` on; closing it ends the reading."""
        steps = range(first_step, self.sampler.steps_per_epoch)
        # Drawn here, not in the reading thread: the sampler caches one epoch's order.
        plan = [
            (
                self.sampler.part(epoch, step, self.shares, self.worker, self.least),
                len(self.sampler.batch(epoch, step)),
            )
            for step in steps
        ]
        return self._read(plan, epoch=epoch, augment=self.augment)

    def _read(
        self, plan: list[tuple[np.ndarray, int]], *, epoch: int, augment: bool
    ) -> Generator[Batch]:
        def fetch(item: tuple[np.ndarray, int]) -> tuple[torch.Tensor, torch.Tensor, int, float]:
            indices, total = item
            start = time.perf_counter()
            if not self.reads_inputs and self.source.targets is not None:
                inputs = torch.empty(0)
                targets = torch.from_numpy(self.source.targets[indices])
            else:
                inputs, targets = self.source.fetch(indices, epoch=epoch, augment=augment)
            return inputs, targets, total, time.perf_counter() - start

        results = _ahead(fetch, plan, self.ahead) if self.source.concurrent else map(fetch, plan)
        while True:
            start = time.perf_counter()
            try:
                inputs, targets, total, seconds = next(results)
            except StopIteration:
                return
            yield Batch(
                inputs=inputs,
                targets=targets,
                count=len(targets),
                total=total,
                read_seconds=seconds,
                wait_seconds=time.perf_counter() - start,
            )


def evaluation_batches(
    source: Source, *, batch_size: int, worker: int = 0, shares: Sequence[float] = (1.0,)
) -> Iterator[Batch]:
    """One worker's part of a test set, in order, without augmentation."""
    sizes = apportion(len(source), shares)
    start = sum(sizes[:worker])
    indices = np.arange(start, start + sizes[worker])
    pieces = [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
    feed = Feed(
        source=source,
        sampler=GlobalSampler(samples=len(source), batch_size=batch_size, seed=0),
        shares=[1.0],
        worker=0,
    )
    return feed._read([(piece, len(piece)) for piece in pieces], epoch=0, augment=False)


def _ahead(
    function: Callable[[Item], Result], items: Iterable[Item], depth: int
) -> Iterator[Result]:
    """`map`, computed up to `depth` items ahead in a thread; errors arrive in order."""
    ready: queue.Queue[tuple[Result | None, BaseException | None, bool]] = queue.Queue(depth)
    stop = threading.Event()

    def put(entry: tuple[Result | None, BaseException | None, bool]) -> None:
        while not stop.is_set():
            try:
                ready.put(entry, timeout=0.1)
                return
            except queue.Full:
                continue

    def read() -> None:
        # One thread for the copy of a batch: more would take cores from the model.
        torch.set_num_threads(1)
        try:
            for item in items:
                if stop.is_set():
                    return
                put((function(item), None, False))
            put((None, None, True))
        except BaseException as error:
            put((None, error, True))

    thread = threading.Thread(target=read, name="paceline-feed", daemon=True)
    thread.start()
    try:
        while True:
            result, error, last = ready.get()
            if error is not None:
                raise error
            if last:
                return
            yield result  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()
