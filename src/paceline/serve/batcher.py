"""Requests that arrive together are computed together.

One batcher per version. When nothing is computed, what waits is taken at once, so that a single
request waits for nobody; while workers compute, requests gather, so that batches grow with the
load. A further worker begins when its share of all that is there waits, or after a few
milliseconds: many small batches cost more than a few large ones, and one that takes all leaves the
others idle. The queue is bounded: what does not fit is refused at once, never kept.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from paceline.serve.loader import Servable
from paceline.serve.setup import buffered

WAIT_PART = 0.1
"""Of the seconds that a batch takes: what a part of it waits for more, where that is longer than
`wait`. A batch twice as large is worth more than so little of its time."""


class QueueFullError(Exception):
    """The queue is full; `seconds` until there may be room."""

    def __init__(self, seconds: float) -> None:
        super().__init__("the queue is full")
        self.seconds = seconds


class TooLateError(Exception):
    """The deadline passed before the request was computed."""


@dataclass(eq=False)
class RequestPart:
    """Samples of one request that are computed together."""

    inputs: np.ndarray
    answer: asyncio.Future[np.ndarray]
    deadline: float
    arrived: float


def _expire(pieces: list[RequestPart]) -> None:
    for piece in pieces:
        if not piece.answer.done():
            piece.answer.set_exception(TooLateError())


class Batcher:
    """The queue before one version, and the batches that are being computed."""

    def __init__(self, servable: Servable, *, queue: int, wait: float) -> None:
        self.servable = servable
        self.queue_limit, self.wait = queue, wait
        self.batches: dict[int, int] = {}
        """How many batches of each size were computed."""
        self._pieces: deque[RequestPart] = deque()
        self._queued = self._running = self._computed = 0
        self._run = buffered(servable.run, servable.setup.batch)
        self._alone = None
        if servable.alone is not None:
            self._alone = (buffered(servable.alone[0], servable.setup.batch), servable.alone[1])
        self.requests = 0
        """From the head to the answer: those that are still read or decoded will wait here soon."""
        self._loop = asyncio.get_running_loop()
        self._called = False
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def queued(self) -> int:
        """Samples that wait."""
        return self._queued

    async def submit(self, inputs: np.ndarray, deadline: float) -> np.ndarray:
        """The outputs of one request, computed with others.

        TooLateError where they are not there at `deadline`, in the loop's time.
        """
        if self._queued + len(inputs) > self.queue_limit:
            rate = self.servable.setup.samples_per_second
            raise QueueFullError(self._queued / max(rate, 1.0))
        size, now = self.servable.setup.batch, self._loop.time()
        pieces = [
            RequestPart(inputs[start : start + size], self._loop.create_future(), deadline, now)
            for start in range(0, len(inputs), size)
        ]
        self._pieces.extend(pieces)
        self._queued += len(inputs)
        self._idle.clear()
        if not self._called:  # after all that has arrived in this turn of the loop
            self._called = True
            self._loop.call_soon(self._start)
        expiry = self._loop.call_at(deadline, _expire, pieces)
        try:
            if len(pieces) == 1:
                return await pieces[0].answer
            return np.concatenate(await asyncio.gather(*(one.answer for one in pieces)))
        finally:
            expiry.cancel()
            for one in pieces:
                one.answer.cancel()

    def _start(self) -> None:
        """Give work to every worker that should have some."""
        self._called = False
        setup = self.servable.setup
        while self._pieces and self._running < setup.workers:
            share = self._share()
            if self._running and self._queued < share:
                seconds = max(self.wait, WAIT_PART * self._expected(share))
                due = self._pieces[0].arrived + seconds
                if due > self._loop.time():
                    if self._timer is None:
                        self._timer = self._loop.call_at(due, self._ring)
                    return
            batch = self._take(share)
            if batch:
                self._compute(batch)
        self._note_idle()

    def _share(self) -> int:
        """Samples of each worker, if what is here and coming is divided evenly.

        Where that would be computed before a part of a batch has waited, it is not worth dividing.
        """
        setup = self.servable.setup
        there = max(self._queued + self._computed, self.requests)
        # A piece is not divided again.
        even = max(len(self._pieces[0].inputs), math.ceil(there / setup.workers))
        worth = even < setup.batch and self._expected(even) > self.wait
        return even if worth else setup.batch

    def _expected(self, count: int) -> float:
        """Seconds that a batch of so many samples takes."""
        setup = self.servable.setup
        return count * setup.workers / max(setup.samples_per_second, 1e-9)

    def _ring(self) -> None:
        self._timer = None
        self._start()

    def _take(self, most: int) -> list[RequestPart]:
        """Pieces for one batch; those that nobody waits for any more are passed over."""
        now, batch, count = self._loop.time(), [], 0
        while self._pieces and count + len(self._pieces[0].inputs) <= most:
            piece = self._pieces.popleft()
            self._queued -= len(piece.inputs)
            if piece.answer.done():
                continue
            if piece.deadline <= now:
                piece.answer.set_exception(TooLateError())
                continue
            batch.append(piece)
            count += len(piece.inputs)
        return batch

    def _compute(self, batch: list[RequestPart]) -> None:
        parts = [one.inputs for one in batch]
        count, run, pool = sum(map(len, parts)), self._run, self.servable.pool
        self.batches[count] = self.batches.get(count, 0) + 1
        if self._alone is not None and not (self._running or self._queued) and self.requests < 2:
            run, pool = self._alone
        future = self._loop.run_in_executor(pool, run, parts)
        self._running += 1
        self._computed += count
        future.add_done_callback(lambda done: self._finish(batch, done))

    def _finish(self, batch: list[RequestPart], done: asyncio.Future[np.ndarray]) -> None:
        self._running -= 1
        self._computed -= sum(len(one.inputs) for one in batch)
        error = done.exception()
        start = 0
        for piece in batch:
            end = start + len(piece.inputs)
            if not piece.answer.done():
                if error is not None:
                    piece.answer.set_exception(error)
                else:
                    piece.answer.set_result(done.result()[start:end])
            start = end
        self._start()

    def _note_idle(self) -> None:
        if not self._pieces and not self._running:
            self._idle.set()

    async def drain(self) -> None:
        """Until nothing waits and nothing is computed."""
        await self._idle.wait()
