"""Small agreements between ranks while a group is made, without pickle."""

from __future__ import annotations

import contextlib
import socket
from array import array
from typing import Any

import psutil
from mpi4py import MPI

from paceline.errors import RunError

_TEXT_BYTES = 1024


def share_text(comm: Any, text: str) -> str:
    encoded = text.encode()
    if len(encoded) > _TEXT_BYTES:
        raise ValueError(f"a text of {len(encoded)} bytes is longer than {_TEXT_BYTES}")
    room = bytearray(encoded.ljust(_TEXT_BYTES, b"\0"))
    comm.Bcast([room, MPI.BYTE], root=0)
    return bytes(room).rstrip(b"\0").decode()


def all_agree(comm: Any, flag: bool) -> bool:
    """Whether the flag is true on every rank."""
    answer = bytearray([1 if flag else 0])
    comm.Allreduce(MPI.IN_PLACE, [answer, MPI.UINT8_T], op=MPI.MIN)
    return answer[0] == 1


def gather_numbers(comm: Any, number: int) -> list[int]:
    """The number of every rank, in the order of ranks, on every rank."""
    numbers = array("q", [0] * comm.Get_size())
    comm.Allgather([array("q", [number]), MPI.INT64_T], [numbers, MPI.INT64_T])
    return list(numbers)


_TRY_SECONDS = 2.0


def agree_on_master(world: Any) -> tuple[str, int]:
    """An address and a free port of rank 0. Every rank of `world` must call this.

    A host often has several addresses and a name that others cannot resolve, so each rank tries
    them and the first that all could reach is taken.
    """
    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    one_machine = min(gather_numbers(world, here.Get_size())) == world.Get_size()
    here.Free()
    candidates = ["127.0.0.1"] if one_machine else _addresses()
    candidates = share_text(world, ",".join(candidates[:16])).split(",")
    with contextlib.ExitStack() as stack:
        port = 0
        if world.Get_rank() == 0:
            # Nothing is read from who calls: that it can is all that is asked.
            address = "127.0.0.1" if one_machine else ""
            listener = stack.enter_context(socket.create_server((address, 0), backlog=256))
            port = listener.getsockname()[1]
        port = gather_numbers(world, port)[0]
        reached = array("b", [_reachable(name, port) for name in candidates])
        world.Allreduce(MPI.IN_PLACE, [reached, MPI.INT8_T], op=MPI.MIN)
    world.Barrier()  # the port is free again before anyone uses it
    for name, everyone in zip(candidates, reached, strict=True):
        if everyone:
            return name, port
    raise RunError(
        f"no address of rank 0 ({', '.join(candidates)}) can be reached by every rank: "
        "set MASTER_ADDR to one that can, and MASTER_PORT to a free port"
    )


def _addresses() -> list[str]:
    """This host's IPv4 addresses, physical-looking networks first, loopback left out."""
    found: list[tuple[int, str]] = []
    for interface, entries in psutil.net_if_addrs().items():
        virtual = interface.startswith(("docker", "virbr", "veth", "br-"))
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                found.append((int(virtual), entry.address))
    return [address for _, address in sorted(found)] or [socket.gethostname()]


def _reachable(name: str, port: int) -> int:
    try:
        with socket.create_connection((name, port), timeout=_TRY_SECONDS):
            return 1
    except OSError:
        return 0
