"""Samples of the user's own data set, read by processes of their own where reading is slow.

Which data sets bear that cannot be asked. A process that is forked has the files of the one before
it at the same place, and both would move it: so each reader works on a copy, made as pickle makes
it. What cannot be pickled (an open file, a lock, a connection) is not read by others. Classes,
functions, tensors and arrays are not copied: a forked process has them already. So what the user's
functions reach by a closure or a global name must be something that could be copied, too.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
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
    def __init__(self, text: io.BytesIO, table: list[Any], seen: set[int] | None = None) -> None:
        super().__init__(text, protocol=5)
        self._table, self._numbers = table, dict[int, int]()
        self._seen = set() if seen is None else seen

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, _SHARED):
            return None
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._table)
            self._table.append(thing)
            for held in _held_by(thing):
                self._check(held)
        return self._numbers[id(thing)]

    def _check(self, thing: Any) -> None:
        """Refuse what is not copied itself but holds what cannot be."""
        if id(thing) not in self._seen:  # functions call each other
            self._seen.add(id(thing))
            _Writer(io.BytesIO(), [], self._seen).dump(thing)


def _held_by(thing: Any) -> Iterator[Any]:
    """What a function or a class of the user's works on besides its arguments."""
    if isinstance(thing, type):
        for base in thing.__mro__:
            for member in vars(base).values():
                inner = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
                if isinstance(inner, types.FunctionType):
                    yield from _held_by(inner)
    if not isinstance(thing, types.FunctionType) or not _is_users(thing.__code__.co_filename):
        return
    for cell in thing.__closure__ or ():
        yield cell.cell_contents
    yield from thing.__defaults__ or ()
    names = set(_names_in(thing.__code__))
    for name in names & thing.__globals__.keys():
        found = thing.__globals__[name]
        if isinstance(
            found, types.ModuleType
        ):  # module.file, as an attribute of a module beside it
            users = _is_users(getattr(found, "__file__", None) or "")
            yield from (vars(found)[n] for n in names & vars(found).keys() if users)
        else:
            yield found


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_users(file: str) -> bool:
    """Whether code is neither Python's own nor of an installed package."""
    installed = {
        sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    places = (*installed, str(Path(__file__).parents[1]), "<frozen")
    return bool(file) and not file.startswith(places)


class _Reader(pickle.Unpickler):
    """Reads only what this process's own `_Writer` wrote into memory."""

    def __init__(self, text: io.BytesIO, table: list[Any]) -> None:
        super().__init__(text)
        self._table = table

    def persistent_load(self, number: int) -> Any:
        return self._table[number]
