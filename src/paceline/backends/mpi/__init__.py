"""MPI for `torch.distributed` from plain wheels.

    registration  makes `init_process_group("mpi4py")` work
    group         the ProcessGroup that torch talks to: sends, receives, and where they run
    collectives   its collectives
    work          what a collective hands back: completed, queued, point to point
    worker        the one thread per communicator that runs queued collectives in order
    node          collectives inside one machine: wait until all are there, then block
    between_hosts collectives between machines: non-blocking, sleeping between tests
    arrival       the shared page on which ranks of one machine say that they are there
    dtypes        torch tensors and operations as MPI sees them
    deadline      time limits, their messages, and the end of a process that cannot go on

This module imports neither torch nor MPI, so that it costs nothing to ask for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Literal

__all__ = ["BACKEND_NAME", "mpi_missing", "open_group", "open_part", "register_mpi"]

BACKEND_NAME = "mpi4py"


def mpi_missing() -> str | None:
    """Why MPI cannot be used here, in one sentence, or None when it can.

    Does not start MPI.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return (
            "MPI needs the package mpi4py, which is not installed: "
            "pip install 'paceline[mpi]' brings it together with Open MPI"
        )
    return None


def register_mpi(
    name: str = BACKEND_NAME, *, transport: Literal["auto", "node", "network"] = "auto"
) -> None:
    """Make `torch.distributed.init_process_group(name)` use MPI.

    Call it on every rank before `init_process_group`; calling it again changes nothing. It starts
    MPI and, where the environment has no RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, fills in
    what mpiexec knows.

    `transport` says how collectives travel: inside one machine (`node`), between machines
    (`network`), or whichever the group's ranks need (`auto`).
    """
    from paceline.backends.mpi.registration import register

    register(name, transport)


def open_group(rank: int, size: int, seconds: float) -> Any:
    """A process group of all MPI ranks, made directly: torch keeps its default group.

    `rank` is this process's number in the group, whatever mpiexec numbered it.
    """
    from paceline.backends.mpi.registration import open_world

    return open_world(rank, size, seconds)


def open_part(members: Sequence[int], rank: int, name: str, seconds: float) -> Any:
    """A process group of some of the ranks of `open_group`; those call it, and nobody else.

    `members` are their numbers there, and `rank` this process's place among them.
    """
    from paceline.backends.mpi.registration import open_some

    return open_some(members, rank, name, seconds)
