"""Small agreements between ranks while a group is made, without pickle."""

from __future__ import annotations

from array import array
from typing import Any

from mpi4py import MPI

__all__ = ["all_agree", "gather_numbers", "share_text"]

_TEXT_BYTES = 1024


def share_text(comm: Any, text: str, *, root: int = 0) -> str:
    """The text of the root, on every rank."""
    encoded = text.encode()
    if len(encoded) > _TEXT_BYTES:
        raise ValueError(f"a text of {len(encoded)} bytes is longer than {_TEXT_BYTES}")
    room = bytearray(encoded.ljust(_TEXT_BYTES, b"\0"))
    comm.Bcast([room, MPI.BYTE], root=root)
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
