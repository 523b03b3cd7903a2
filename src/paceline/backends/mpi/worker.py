"""The one thread per communicator that runs queued collectives in order.

MPI wants collectives on a communicator in the same order on every rank, so they are never run side
by side. A collective that its caller waits for anyway is run by the caller when nothing is queued:
that saves two changes of thread, which cost more than a small all-reduce.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from paceline.errors import RunError

if TYPE_CHECKING:
    from paceline.backends.mpi.work import QueuedWork


class Completions:
    """Runs what users attached to futures, on threads of its own.

    Such a callback may start another collective and wait for it (PowerSGD does), so it can run
    neither on the thread that serves collectives nor behind another callback.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def submit(self, callback: Callable[[], None]) -> None:
        """Run `callback` soon; an idle thread takes it, or a new one."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(64, thread_name_prefix="paceline-mpi-callback")
            self._pool.submit(callback)

    def close(self) -> None:
        """Let running callbacks finish, start no more."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False)
                self._pool = None


class Worker:
    """First in, first out, one at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._execution = threading.Lock()
        self._pending = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def try_enter(self) -> bool:
        """Whether the caller may run its collective itself; then it must call `leave`."""
        return self._pending == 0 and self._execution.acquire(blocking=False)

    def leave(self) -> None:
        self._execution.release()

    def submit(self, work: QueuedWork) -> None:
        """Run `work` after everything submitted before it."""
        with self._lock:
            if self._closed:
                raise RunError(
                    f"{work.operation} was called on a process group that has been destroyed"
                )
            self._pending += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put(work)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            with self._execution:
                work.run()
            with self._lock:
                self._pending -= 1
            # The last reference to a user's tensor must not live on in this frame.
            del work

    def close(self, timeout: float) -> bool:
        """Finish what is queued and end the thread; False when it did not end in time."""
        with self._lock:
            self._closed = True
            thread = self._thread
            if thread is not None:
                self._queue.put(None)
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()
