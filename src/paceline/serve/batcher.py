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
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from paceline.serve.loader import Servable
from paceline.serve.setup import BatchRun, LoneChoice, buffered

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


Outcome = np.ndarray | BaseException
"""The outputs of a request, or why there are none."""


@dataclass(eq=False, slots=True)
class RequestPart:
    """Samples of one request that are computed together."""

    inputs: np.ndarray
    deadline: float
    arrived: float
    tell: Callable[[Outcome], None]
    is_settled: bool = False

    def settle(self, outcome: Outcome) -> None:
        """Tell what came of it, once."""
        if not self.is_settled:
            self.is_settled = True
            self.tell(outcome)


def _tell(answer: asyncio.Future[np.ndarray], outcome: Outcome) -> None:
    if answer.done():
        return
    if isinstance(outcome, BaseException):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


class Batcher:
    """The queue before one version, and the batches that are being computed."""

    def __init__(self, servable: Servable, *, queue: int, wait: float) -> None:
        self.servable = servable
        self.queue_limit, self.wait = queue, wait
        self.batches: dict[int, int] = {}
        """How many batches of each size were computed."""
        self._pieces: deque[RequestPart] = deque()
        self.queued = 0
        """Samples that wait."""
        self._running = self._computed = 0
        self._run = buffered(servable.run, servable.setup.batch)
        self._alone = None
        self._lone = LoneChoice()
        if servable.alone is not None:
            self._alone = (buffered(servable.alone[0], servable.setup.batch), servable.alone[1])
        self.requests = 0
        """From the head to the answer: those that are still read or decoded will wait here soon."""
        self._loop = asyncio.get_running_loop()
        self._called = False
        self._timer: asyncio.TimerHandle | None = None
        self._live: set[RequestPart] = set()
        self._expiry: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def submit(self, inputs: np.ndarray, deadline: float) -> np.ndarray:
        """The outputs of one request, computed with others.

        TooLateError where they are not there at `deadline`, in the loop's time.
        """
        if not self.has_room(len(inputs)):
            rate = self.servable.setup.samples_per_second
            raise QueueFullError(self.queued / max(rate, 1.0))
        size = self.servable.setup.batch
        answers: list[asyncio.Future[np.ndarray]] = []
        parts = []
        for start in range(0, len(inputs), size):
            answers.append(self._loop.create_future())
            tell = partial(_tell, answers[-1])
            parts.append(self.add(inputs[start : start + size], deadline, tell))
        try:
            if len(answers) == 1:
                return await answers[0]
            return np.concatenate(await asyncio.gather(*answers))
        finally:
            for part, answer in zip(parts, answers, strict=True):
                part.is_settled = True  # nobody waits for it any more
                self._live.discard(part)
                answer.cancel()

    def has_room(self, count: int) -> bool:
        """Whether so many more samples may wait."""
        return self.queued + count <= self.queue_limit

    def add(
        self, inputs: np.ndarray, deadline: float, tell: Callable[[Outcome], None]
    ) -> RequestPart:
        """Compute samples that fit into one batch, and tell their outputs from the event loop."""
        part = RequestPart(inputs, deadline, self._loop.time(), tell)
        self._pieces.append(part)
        self._live.add(part)
        self.queued += len(inputs)
        self._idle.clear()
        if not self._called:  # after all that has arrived in this turn of the loop
            self._called = True
            self._loop.call_soon(self._start)
        if self._expiry is None or deadline < self._expiry.when():
            self._expire_at(deadline)
        return part

    def _expire_at(self, when: float) -> None:
        """One timer for all requests: of their own they would take as long as their parsing."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._loop.call_at(when, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now = self._loop.time()
        for part in [one for one in self._live if one.deadline <= now]:
            self._settle(part, TooLateError())
        if self._live:
            self._expire_at(min(one.deadline for one in self._live))

    def _settle(self, part: RequestPart, outcome: Outcome) -> None:
        """Whatever goes wrong in telling one request must not keep the others waiting."""
        self._live.discard(part)
        try:
            part.settle(outcome)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": "a request could not be answered", "exception": error}
            )

    def _start(self) -> None:
        """Give work to every worker that should have some."""
        self._called = False
        setup = self.servable.setup
        while self._pieces and self._running < setup.workers:
            share = self._share()
            if self._running and self.queued < share:
                seconds = max(self.wait, WAIT_PART * self._expected(share))
                due = self._pieces[0].arrived + seconds
                if due > self._loop.time():
                    if self._timer is None:
                        self._timer = self._loop.call_at(due, self._ring)
                    return
            batch = self._take(share)
            if batch:
                self._compute(batch)
        if not self._pieces and not self._running:
            self._idle.set()

    def _share(self) -> int:
        """Samples of each worker, if what is here and coming is divided evenly.

        Where that would be computed before a part of a batch has waited, it is not worth dividing.
        """
        setup = self.servable.setup
        there = max(self.queued + self._computed, self.requests)
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
            self.queued -= len(piece.inputs)
            if piece.is_settled:
                continue
            if piece.deadline <= now:
                self._settle(piece, TooLateError())
                continue
            batch.append(piece)
            count += len(piece.inputs)
        return batch

    def _compute(self, batch: list[RequestPart]) -> None:
        count, run, pool = sum(len(one.inputs) for one in batch), self._run, self.servable.pool
        self.batches[count] = self.batches.get(count, 0) + 1
        self._running += 1
        self._computed += count
        if not (self._running > 1 or self.queued) and self.requests < 2:
            if self.servable.setup.is_instant:
                self._loop.call_soon(self._finish, batch, _computed(run, batch))
                return
            if self._alone is not None:
                which = self._lone.next()
                run, pool = self._alone if which else (run, pool)
                pool.submit(self._work_alone, run, batch, which)
                return
        pool.submit(self._work, run, batch)

    def _work_alone(self, run: BatchRun, batch: list[RequestPart], which: int) -> None:
        start = time.perf_counter()
        outcome = _computed(run, batch)
        self._lone.note(which, time.perf_counter() - start)
        self._loop.call_soon_threadsafe(self._finish, batch, outcome)

    def _work(self, run: BatchRun, batch: list[RequestPart]) -> None:
        """In a worker's thread."""
        self._loop.call_soon_threadsafe(self._finish, batch, _computed(run, batch))

    def _finish(self, batch: list[RequestPart], outcome: Outcome) -> None:
        self._running -= 1
        self._computed -= sum(len(one.inputs) for one in batch)
        self._start()  # the workers first: answers are written while they compute
        start = 0
        for piece in batch:
            end = start + len(piece.inputs)
            given = outcome if isinstance(outcome, BaseException) else outcome[start:end]
            self._settle(piece, given)
            start = end

    async def drain(self) -> None:
        """Until nothing waits and nothing is computed."""
        await self._idle.wait()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


def _computed(run: BatchRun, batch: list[RequestPart]) -> Outcome:
    try:
        return run([one.inputs for one in batch])
    except BaseException as error:
        return error
