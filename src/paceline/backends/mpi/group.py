"""The ProcessGroup that torch talks to, over mpi4py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from paceline.backends.mpi.between_hosts import NetworkTransport
from paceline.backends.mpi.collectives import Collectives, Tensors
from paceline.backends.mpi.deadline import EXIT, Deadline, GroupPlace, end_process_at_exit
from paceline.backends.mpi.dtypes import buffer, host, put_back
from paceline.backends.mpi.node import NodeTransport
from paceline.backends.mpi.work import (
    CompletedWork,
    MpiWork,
    PointToPointWork,
    QueuedWork,
    explained,
)
from paceline.backends.mpi.worker import Completions, Worker
from paceline.errors import RunError, UnsupportedError

_CLOSE_SECONDS = 5.0


class MpiProcessGroup(Collectives):
    """Collectives and messages of one group of ranks."""

    def __init__(
        self,
        place: GroupPlace,
        seconds: float,
        transport: NodeTransport | NetworkTransport,
        message_comm: Any,
        name: str,
    ) -> None:
        # Torch's declared constructor takes a store too; a Python subclass is made without.
        super().__init__(place.rank, place.size)  # type: ignore[call-arg]
        self._place = place
        self._seconds = seconds
        self._transport = transport
        self._name = name
        self._group_name = ""
        self._group_description = ""
        self._failure: BaseException | None = None
        self._closed = False
        self._completions = Completions()
        self._worker = Worker(f"paceline-mpi-{place.group}")
        self._messages = Messages(message_comm, place, seconds, self._completions)
        EXIT.open_groups += 1

    # -- names: a group without a C++ backend has to keep them itself ----------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called by torch after the group is made."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Called by torch after the group is made."""
        self._group_description = description

    # -- running one operation ---------------------------------------------------------------------

    def _launch(
        self, operation: str, call: Callable[[Deadline], None], tensors: Tensors, options: Any
    ) -> MpiWork:
        """Run `call` here when the caller waits anyway and nothing is queued, else queue it."""
        if self._failure is not None or self._closed:
            self._refuse(operation)
        seconds = self._seconds
        limit = getattr(options, "timeout", None)
        if limit is not None and limit.total_seconds() > 0:
            seconds = limit.total_seconds()
        if getattr(options, "asyncOp", True) or not self._worker.try_enter():
            work = QueuedWork(
                operation,
                tensors,
                self._completions,
                self._remembering(call),
                lambda: Deadline(operation, self._place, seconds, background=True),
            )
            self._worker.submit(work)
            return work
        try:
            self._remembering(call)(Deadline(operation, self._place, seconds))
        except Exception as error:
            raise explained(error, operation, self._place) from None
        finally:
            self._worker.leave()
        return CompletedWork(operation, tensors)

    def _remembering(self, call: Callable[[Deadline], None]) -> Callable[[Deadline], None]:
        def guarded(deadline: Deadline) -> None:
            if self._failure is not None:
                self._refuse(deadline.operation)
            try:
                call(deadline)
            except BaseException as error:
                self._failure = error
                raise

        return guarded

    def _refuse(self, operation: str) -> None:
        if self._closed:
            raise RunError(f"{operation} was called on a process group that has been destroyed")
        raise RunError(
            f"{operation} on {self._place} cannot run: the group failed before ({self._failure}); "
            "start the job again"
        )

    # -- messages ----------------------------------------------------------------------------------

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> MpiWork:
        return self._message("send", lambda: self._messages.send(tensors[0], peer, tag))

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> MpiWork:
        return self._message("recv", lambda: self._messages.receive(tensors[0], peer, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> MpiWork:
        """Receive from whoever sends first."""
        return self._message("recv", lambda: self._messages.receive(tensors[0], None, tag))

    def _message(self, operation: str, post: Callable[[], MpiWork]) -> MpiWork:
        if self._failure is not None or self._closed:
            self._refuse(operation)
        try:
            return post()
        except Exception as error:
            raise explained(error, operation, self._place) from None

    # -- the end ------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish what is queued, then stop the threads. Called by `destroy_process_group`."""
        if self._closed:
            return
        self._closed = True
        seconds = self._seconds if self._failure is None else _CLOSE_SECONDS
        ended = self._worker.close(seconds)
        settled = self._messages.close()
        self._completions.close()
        EXIT.open_groups -= 1
        if ended:
            self._transport.close()
        if not (ended and settled):
            end_process_at_exit()

    def abort(self) -> None:
        """Stop without waiting for the others."""
        self._failure = self._failure or RunError("abort() was called")
        self.shutdown()


# Whoever waits for a message tests it closely. This thread is for those that nobody waits for yet:
# a large send needs MPI to be called again and again before it leaves.
_SLEEP = 0.5e-3


class Messages:
    """Point-to-point traffic of one group, on a communicator of its own."""

    def __init__(
        self, comm: Any, place: GroupPlace, seconds: float, completions: Completions
    ) -> None:
        self._comm = comm
        self._place = place
        self._seconds = seconds
        self._completions = completions
        self._largest_tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32_767)
        self._open: set[PointToPointWork] = set()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> PointToPointWork:
        """Send to rank `peer` of the group."""
        operation = f"send to {self._place.world([peer])}"
        flat = host(tensor)
        request = self._comm.Isend(buffer(flat), dest=peer, tag=self._checked(tag))
        # The copy in `flat` has to live as long as the request: the tensors of the work keep it.
        return self._opened(operation, [tensor, flat], request, peer, None)

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> PointToPointWork:
        """Receive from rank `peer` of the group, or from any."""
        source = MPI.ANY_SOURCE if peer is None else peer
        name = "any rank" if peer is None else self._place.world([peer])
        flat = host(tensor, read=False)
        request = self._comm.Irecv(buffer(flat), source=source, tag=self._checked(tag))
        return self._opened(
            f"recv from {name}", [tensor], request, peer, lambda: put_back(tensor, flat)
        )

    def _checked(self, tag: int) -> int:
        if not 0 <= tag <= self._largest_tag:
            raise UnsupportedError(
                f"tag {tag} cannot be carried by this MPI: use 0 to {self._largest_tag}"
            )
        return tag

    def _opened(
        self,
        operation: str,
        tensors: list[torch.Tensor],
        request: Any,
        peer: int | None,
        finish: Any,
    ) -> PointToPointWork:
        work = PointToPointWork(
            operation,
            tensors,
            self._completions,
            request,
            lambda: Deadline(operation, self._place, self._seconds),
            peer,
            finish,
        )
        self._open.add(work)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._progress, name="paceline-mpi-messages", daemon=True
            )
            self._thread.start()
        if not self._wake.is_set():
            self._wake.set()
        return work

    def _progress(self) -> None:
        while not self._closed:
            if not self._open:
                self._wake.clear()
                if not self._open:
                    self._wake.wait()
            time.sleep(_SLEEP)
            for work in list(self._open):
                if work.test():
                    self._open.discard(work)
                else:
                    work.expire()

    def close(self) -> bool:
        """Stop the thread; False when messages are still under way."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(5.0)
        self._open = {work for work in self._open if not work.test()}
        return not self._open
