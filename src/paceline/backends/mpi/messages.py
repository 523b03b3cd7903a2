"""Sends and receives: posted by the caller, moved on by a thread that mostly sleeps."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from mpi4py import MPI

from paceline.backends.mpi.deadline import Deadline, GroupPlace
from paceline.backends.mpi.dtypes import buffer, host, put_back
from paceline.backends.mpi.work import PointToPointWork
from paceline.backends.mpi.worker import Completions
from paceline.errors import UnsupportedError

__all__ = ["Messages"]

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
