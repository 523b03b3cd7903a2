"""Samples of the user's own data set, read by processes of their own where reading is slow.

Which data sets bear that cannot be asked. A process that is forked has the files of the one before
it at the same place, and both would move it: so each reader works on a copy, made as pickle makes
it. What cannot be pickled (an open file, a lock, a connection) is not read by others. Classes,
functions, tensors and arrays are not copied: a forked process has them already.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.data.base import Source

WORTH = 0.05
"""Part of the time that may go into reading before others read: what trying costs elsewhere."""
LOOKED_AT = 4
"""Batches by which that is judged; the first, which may open files, is not among them."""
STARTING = 1.0
"""Seconds of reading that must be left in an epoch: starting processes takes tenths of one."""
_SHARED = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, torch.Tensor, np.ndarray,
)  # fmt: skip


class Balance:
    """How long reading and computing take, batch by batch."""

    def __init__(self) -> None:
        self.read = self.computed = 0.0
        self.batches = -1

    def add(self, read: float, computed: float) -> None:
        self.batches += 1
        if self.batches:
            self.read, self.computed = self.read + read, self.computed + computed

    def readers(self, cores: int, left: int) -> int:
        """Processes that keep up with the computing; 0 where reading is no hindrance, or there are
        too few batches left.

        >>> balance = Balance()
        >>> for _ in range(5): balance.add(0.3, 0.1)
        >>> balance.readers(2, 99), balance.readers(8, 99), balance.readers(8, 3)
        (2, 3, 0)
        """
        if self.batches < LOOKED_AT or self.read <= WORTH * (self.read + self.computed):
            return 0
        if self.read / self.batches * left < STARTING:
            return 0
        if self.computed * cores <= self.read:
            return cores
        return max(1, -int(-self.read // self.computed))


def own_cores() -> int:
    return len(os.sched_getaffinity(0))


def may_fork() -> bool:
    """MPI does not bear it once it is open."""
    return "mpi4py.MPI" not in sys.modules


class OnCopy:
    """A function of (item, source), called in forked processes with a copy of the source."""

    def __init__(self, function: Callable[[Any, Source], Any], source: Source) -> None:
        """Raises whatever pickle raises where there can be no copy."""
        self._function = function
        self._table: list[Any] = []
        text = io.BytesIO()
        _Writer(text, self._table).dump(source)
        self._content = text.getvalue()
        self._copy: Source | None = None

    def __call__(self, item: Any) -> Any:
        if self._copy is None:
            self._copy = _Reader(io.BytesIO(self._content), self._table).load()
        assert isinstance(self._copy, Source)
        return self._function(item, self._copy)


class _Writer(pickle.Pickler):
    def __init__(self, text: io.BytesIO, table: list[Any]) -> None:
        super().__init__(text, protocol=5)
        self._table = table
        self._numbers: dict[int, int] = {}

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, _SHARED):
            return None
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._table)
            self._table.append(thing)
            self._look_into(thing)
        return self._numbers[id(thing)]

    def _look_into(self, thing: Any) -> None:
        """Refuse a function that holds what cannot be copied."""
        for cell in getattr(thing, "__closure__", None) or ():
            inner = _Writer(io.BytesIO(), [])
            inner._numbers = dict(self._numbers)  # a function may hold itself
            inner.dump(cell.cell_contents)


class _Reader(pickle.Unpickler):
    """Reads only what this process's own `_Writer` wrote into memory."""

    def __init__(self, text: io.BytesIO, table: list[Any]) -> None:
        super().__init__(text)
        self._table = table

    def persistent_load(self, number: int) -> Any:
        return self._table[number]
