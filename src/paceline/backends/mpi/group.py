"""The ProcessGroup that torch talks to, over mpi4py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.backends.mpi.between_hosts import NetworkTransport
from paceline.backends.mpi.collectives import Collectives, Tensors
from paceline.backends.mpi.deadline import EXIT, Deadline, GroupPlace, end_process_at_exit
from paceline.backends.mpi.messages import Messages
from paceline.backends.mpi.node import NodeTransport
from paceline.backends.mpi.work import CompletedWork, MpiWork, QueuedWork, explained
from paceline.backends.mpi.worker import Completions, Worker
from paceline.errors import RunError

__all__ = ["MpiProcessGroup"]

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
        """The name the backend is registered under."""
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        """The name torch gave the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called by torch after the group is made."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the group is for."""
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
        """Send to one rank."""
        return self._message("send", lambda: self._messages.send(tensors[0], peer, tag))

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> MpiWork:
        """Receive from one rank."""
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
