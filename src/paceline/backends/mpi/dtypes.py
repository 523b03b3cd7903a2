"""Torch tensors, types and operations as MPI sees them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from paceline.errors import UnsupportedError

# Above this many elements torch uses its thread pool. A second pool, in the thread that serves
# collectives, would take cores from the computation, so work there goes in slices of this size.
_SLICE = 32_768

_NATIVE: dict[torch.dtype, Any] = {
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
# Data that only moves needs no meaning, just its width.
_BY_WIDTH = {
    1: MPI.UINT8_T,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}
_OPERATIONS = {
    "SUM": MPI.SUM,
    "AVG": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
}
_BITWISE = ("BAND", "BOR", "BXOR")


@dataclass(frozen=True)
class Reduction:
    """How MPI computes one operation on one type."""

    operation: Any
    """The MPI operation."""
    datatype: Any
    """The MPI type that is added up."""
    through: torch.dtype | None
    """The wider type to compute in, for types MPI cannot add (bf16, fp16)."""
    average: bool
    """Whether to divide by the number of ranks afterwards."""

    def combine(self, parts: list[torch.Tensor], result: torch.Tensor) -> None:
        """Reduce `parts` in their order into `result` (which may be one of them)."""
        wide = self.through or result.dtype
        total = torch.empty(result.numel(), dtype=wide)
        scratch = torch.empty_like(total) if self.through else None
        move(total, parts[0])
        target = buffer(total, self.datatype)
        for part in parts[1:]:
            if scratch is not None:
                move(scratch, part)
                part = scratch
            self.operation.Reduce_local(buffer(part, self.datatype), target)
        move(result, total)

    def finish(self, flat: torch.Tensor, size: int) -> None:
        """Turn a sum into a mean where that was asked for."""
        if self.average and size > 1:
            rounding = None if flat.is_floating_point() or flat.is_complex() else "trunc"
            for part in slices(flat):
                part.div_(size, rounding_mode=rounding)


def _operation_name(operation: Any) -> str:
    for name in _OPERATIONS:
        if operation == getattr(dist.ReduceOp, name):
            return name
    raise UnsupportedError(
        f"reduce operation {operation!r} cannot be carried by MPI; valid: " + ", ".join(_OPERATIONS)
    )


@functools.lru_cache(maxsize=256)
def _plan(name: str, dtype: torch.dtype) -> Reduction:
    if dtype.is_complex and name in ("MIN", "MAX", *_BITWISE):
        raise UnsupportedError(
            f"reduce operation {name} is not defined for {dtype}: complex numbers have no order "
            "and no bits; use SUM, AVG or PRODUCT"
        )
    if dtype.is_floating_point and name in _BITWISE:
        raise UnsupportedError(f"reduce operation {name} needs an integer type, not {dtype}")
    if dtype is torch.bool:
        # Stored as the bytes 0 and 1: "or" is the maximum and "and" the minimum.
        logical = {"SUM": MPI.MAX, "MAX": MPI.MAX, "PRODUCT": MPI.MIN, "MIN": MPI.MIN}
        if name == "AVG":
            raise UnsupportedError("reduce operation AVG is not defined for torch.bool; use SUM")
        return Reduction(logical.get(name, _OPERATIONS[name]), MPI.UINT8_T, None, False)
    average = name == "AVG"
    if dtype in _NATIVE:
        return Reduction(_OPERATIONS[name], _NATIVE[dtype], None, average)
    if dtype.is_floating_point:
        return Reduction(_OPERATIONS[name], MPI.FLOAT, torch.float32, average)
    raise UnsupportedError(
        f"tensors of type {dtype} cannot be reduced; valid: "
        + ", ".join(sorted(str(kind) for kind in _NATIVE))
        + " and every floating type"
    )


def reduction(operation: Any, dtype: torch.dtype) -> Reduction:
    """The MPI form of a torch reduce operation on `dtype`."""
    return _plan(_operation_name(operation), dtype)


def buffer(flat: torch.Tensor, datatype: Any = None) -> list[Any]:
    """A contiguous CPU tensor as mpi4py takes it, without a copy."""
    width = flat.element_size()
    count = flat.numel()
    memory = MPI.memory.fromaddress(flat.data_ptr(), count * width)
    return [memory, count, datatype or _BY_WIDTH[width]]


def host(tensor: torch.Tensor, *, read: bool = True) -> torch.Tensor:
    """A flat, contiguous CPU tensor with the contents of `tensor`: itself where it is one.

    With `read=False` only the room is wanted.
    """
    if tensor.layout != torch.strided:
        raise UnsupportedError(
            f"tensors of layout {tensor.layout} cannot be sent over MPI: call .to_dense() first"
        )
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        if not read:
            raise UnsupportedError(
                "a conjugated or negated view cannot receive: call .resolve_conj() first"
            )
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor.view(-1)
    if read:
        return tensor.to("cpu").contiguous().view(-1)
    return torch.empty(tensor.numel(), dtype=tensor.dtype)


def put_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Bring `flat` (from `host`) back into `tensor`, if it is not its memory already."""
    if tensor.data_ptr() == flat.data_ptr() and tensor.device.type == "cpu":
        return
    with torch.no_grad():
        tensor.detach().copy_(flat.view(tensor.shape))
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def slices(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """`flat` in pieces too small for torch's thread pool."""
    for start in range(0, flat.numel(), _SLICE):
        yield flat[start : start + _SLICE]


def move(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between two flat contiguous CPU tensors of equal length, in this thread alone."""
    if target.dtype == source.dtype:
        if target.data_ptr() != source.data_ptr() and target.numel():
            ctypes.memmove(
                target.data_ptr(), source.data_ptr(), target.numel() * target.element_size()
            )
        return
    for into, out_of in zip(slices(target), slices(source), strict=True):
        into.copy_(out_of)
