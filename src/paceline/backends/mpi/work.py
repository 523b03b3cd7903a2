"""What an operation hands back, as `torch.distributed.Work`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.backends.mpi.deadline import WAITER_GRACE, Deadline, Patience, end_process_at_exit
from paceline.backends.mpi.worker import Completions
from paceline.errors import DeadlineError, RunError


def explained(error: BaseException, operation: str, place: object) -> BaseException:
    """An error of MPI as one that names the operation and the rank; others as they are."""
    if type(error).__module__.startswith("mpi4py"):
        end_process_at_exit()
        return RunError(f"{operation} on {place} failed inside MPI: {error}")
    if isinstance(error, DeadlineError):
        end_process_at_exit()
    return error


def _seconds(timeout: timedelta | None) -> float | None:
    """Torch says "no limit" with a duration of zero."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds()
    return seconds if seconds > 0 else None


class MpiWork(dist.Work):
    """What all kinds of work share: result, error and future."""

    def __init__(self, operation: str, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.operation = operation
        self._tensors = tensors
        self._error: BaseException | None = None

    def is_completed(self) -> bool:
        """Whether the operation is over, well or not."""
        raise NotImplementedError

    def is_success(self) -> bool:
        """Whether the operation is over and went well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        """The same as `wait`: the outcome is in host memory."""
        self.wait()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation is over; raise what went wrong."""
        raise NotImplementedError


class CompletedWork(MpiWork):
    """The caller has run the operation itself."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class _LaterWork(MpiWork):
    """Work that ends on another thread than it began."""

    def __init__(
        self, operation: str, tensors: list[torch.Tensor], completions: Completions
    ) -> None:
        super().__init__(operation, tensors)
        self._completions = completions
        self._lock = threading.Lock()
        self._over = False
        self._trigger: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def is_completed(self) -> bool:
        """Whether the operation is over, well or not."""
        return self._over

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the tensors, or with the error.

        The error is raised inside `then`, which turns it into one that C++ may carry without the
        interpreter's lock; `set_exception` would keep a Python object there and crash DDP.
        """
        with self._lock:
            if self._future is None:
                self._trigger = torch.futures.Future()
                self._future = self._trigger.then(self._outcome)
                if self._over:
                    self._complete(self._trigger)
            return self._future

    def _complete(self, trigger: torch.futures.Future[Any]) -> None:
        self._completions.submit(lambda: trigger.set_result(None))

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._over:
                return
            self._error = error
            self._over = True
            trigger = self._trigger
        if trigger is not None:
            self._complete(trigger)


class QueuedWork(_LaterWork):
    """A collective that the worker thread runs."""

    def __init__(
        self,
        operation: str,
        tensors: list[torch.Tensor],
        completions: Completions,
        call: Callable[[Deadline], None],
        deadline: Callable[[], Deadline],
    ) -> None:
        super().__init__(operation, tensors, completions)
        self._call: Callable[[Deadline], None] | None = call
        self._make_deadline = deadline
        self._deadline: Deadline | None = None
        self._event = threading.Event()

    def run(self) -> None:
        """Called once, by the worker."""
        assert self._call is not None
        error: BaseException | None = None
        self._deadline = self._make_deadline()
        try:
            self._call(self._deadline)
        except BaseException as caught:  # raised again where someone waits
            error = explained(caught, self.operation, self._deadline.place)
        self._call = None
        self._end(error)
        self._event.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the collective is over; raise what went wrong."""
        limit = _seconds(timeout)
        end = None if limit is None else time.monotonic() + limit
        while not self._event.wait(
            1.0 if end is None else min(1.0, max(0.0, end - time.monotonic()))
        ):
            deadline = self._deadline
            if deadline is not None and deadline.passed(WAITER_GRACE):
                end_process_at_exit()
                raise deadline.error()
            if end is not None and time.monotonic() >= end:
                raise DeadlineError(
                    f"{self.operation} was not over after the {limit:g} s that wait() was given"
                )
        if self._error is not None:
            raise self._error
        return True


class PointToPointWork(_LaterWork):
    """A send or a receive, moved on by whoever looks at it."""

    def __init__(
        self,
        operation: str,
        tensors: list[torch.Tensor],
        completions: Completions,
        request: Any,
        deadline: Callable[[], Deadline],
        peer: int | None,
        finish: Callable[[], None] | None,
    ) -> None:
        super().__init__(operation, tensors, completions)
        self._request = request
        self._make_deadline = deadline
        self._latest = deadline()
        self._peer = peer
        self._source: int = -1 if peer is None else peer
        self._finish = finish
        self._testing = threading.Lock()

    def test(self) -> bool:
        """Move on if possible; whether it is over."""
        if self._over:
            return True
        if not self._testing.acquire(blocking=False):
            return self._over
        try:
            if not self._over:
                self._test()
        finally:
            self._testing.release()
        return self._over

    def _test(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        try:
            if not self._request.Test(status):
                return
            if self._finish is not None:
                self._finish()
                self._source = status.Get_source()
        except BaseException as caught:  # raised again where someone waits
            self._end(explained(caught, self.operation, self._latest.place))
        else:
            self._end(None)

    def expire(self) -> None:
        """End a work that only a future waits for, when its time is over."""
        if self._future is not None and not self._over and self._latest.passed():
            self._end(explained(self._late(self._latest), self.operation, self._latest.place))

    def _late(self, deadline: Deadline) -> DeadlineError:
        others = [rank for rank in range(deadline.place.size) if rank != deadline.place.rank]
        return deadline.error(others if self._peer is None else [self._peer])

    def is_completed(self) -> bool:
        return self.test()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the message has gone or come; raise what went wrong."""
        deadline = self._make_deadline()
        limit = _seconds(timeout)
        if limit is not None:
            deadline = Deadline(self.operation, deadline.place, limit)
        patience = Patience(deadline)
        while not self.test():
            if not patience.pause() and not self._over:
                end_process_at_exit()
                raise self._late(deadline)
        if self._error is not None:
            raise self._error
        return True

    def source_rank(self) -> int:
        """The rank of the group that a received message came from."""
        return self._source

    _source_rank = source_rank
