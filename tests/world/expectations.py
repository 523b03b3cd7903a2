"""What each backend is known to refuse or get wrong; everything else must be right.

A row that no longer holds fails its test too, so that this table, and the one in docs/backends.md,
stay true. Seen with torch 2.13.
"""

from __future__ import annotations

_INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
_MESSAGES = ("send_recv", "isend_irecv")
# Gloo takes the address of these tensors and ignores their strides: the result is wrong, and
# nothing says so.
_GLOO_IGNORES_STRIDES = (
    "all_reduce_sum",
    "all_reduce_avg",
    "all_reduce_min",
    "all_reduce_max",
    "all_reduce_product",
    "all_reduce_async",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "scatter",
    "sub_group",
)


def expected(engine: str, case: str, size: int) -> str:
    """`passed`, `refused` or `wrong`."""
    operation, dtype, shape = case.split("/")
    if dtype.startswith("complex") and operation in (
        "all_reduce_min",
        "all_reduce_max",
        "all_reduce_product",
    ):
        return "refused"  # by torch, before any backend is asked
    if operation == "all_reduce_avg" and dtype == "bool":
        return "refused"
    return "passed" if engine == "mpi" else _gloo(operation, dtype, shape, size)


def _gloo(operation: str, dtype: str, shape: str, size: int) -> str:
    if operation in _MESSAGES:
        return "refused" if shape == "strided" and size > 1 else "passed"
    if operation == "all_reduce_avg" and dtype in _INTEGERS:
        return "refused"
    if operation == "all_gather_uneven" and size > 1:
        return "refused"
    if dtype == "int16" or (operation == "gather" and dtype.startswith("complex")):
        return "refused"
    if operation == "all_to_all_single" and shape == "strided":
        return "refused"
    if operation == "all_to_all_single_uneven" and shape == "strided" and size > 1:
        return "refused"
    if shape == "strided" and operation in _GLOO_IGNORES_STRIDES:
        members = (size + 1) // 2 if operation == "sub_group" else size
        return "wrong" if members > 1 or operation == "scatter" else "passed"
    return "passed"
