"""What a user's own functions keep outside of the model, so that a proof leaves it as it was.

A step may count its calls in a global, keep a slow copy of the weights beside the model, or build a
fixed network when it is first called. A proof calls it too, without chance and on copies: what it
changes there must be undone, and where results depend on it the plan cannot be proved, since every
process (or thread) would change its own.

Looked at is what the functions can reach by name: globals, closures, defaults, what they are
methods of, and so on through functions of one's own; not what installed packages keep.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_INSTALLED = tuple(
    sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)


class Outside:
    """The state that functions can reach, as it was when this was made."""

    def __init__(self, functions: Sequence[Any]) -> None:
        self.functions = tuple(functions)
        self._kept: list[_Kept] = []
        self._seen: dict[int, Any] = {}
        for function in functions:
            self._look(function, getattr(function, "__name__", type(function).__name__))

    def changed(self, *, growing: bool = True) -> str:
        """The name of the first thing that is not as it was; empty where all is.

        `growing`: also lists that have only more items, as records of losses have.
        """
        return next(
            (
                each.name
                for each in self._kept
                if not each.is_as_it_was() and (growing or not each.has_grown())
            ),
            "",
        )

    def reached(self, things: Iterable[Any]) -> Any:
        """The first of these that the functions can reach, or None."""
        return next((each for each in things if id(each) in self._seen), None)

    def restore(self) -> None:
        """Put everything back."""
        for each in self._kept:
            if not each.is_as_it_was():
                each.put_back()

    def _look(self, value: Any, name: str) -> None:
        if isinstance(value, PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # held, so that no other object gets its number
        if isinstance(value, functools._lru_cache_wrapper):
            self._kept.append(_Cache(value, name))
            value = value.__wrapped__
        if isinstance(value, FunctionType):
            self._look_into_function(value, name)
        elif isinstance(value, MethodType):
            self._look(value.__func__, name)
            self._look(value.__self__, name)
        elif isinstance(value, functools.partial):
            self._look_at_each({0: value.func, 1: value.args, 2: value.keywords}, name)
        elif isinstance(value, tuple | frozenset):
            self._look_at_each(dict(enumerate(value)), name)
        elif (kept := _kept(value, name)) is not None:
            self._kept.append(kept)
            self._look_at_each(kept.inside(), name)
            called = "forward" if isinstance(value, nn.Module) else "__call__"
            self._look(getattr(type(value), called, None), name)

    def _look_at_each(self, values: dict[Any, Any], name: str) -> None:
        for value in values.values():
            self._look(value, name)

    def _look_into_function(self, function: FunctionType, name: str) -> None:
        if is_installed(function.__code__.co_filename):
            return
        names = set(_names(function.__code__))
        held = names & function.__globals__.keys()
        self._keep_places(function.__globals__, held)
        for each in held:
            value = function.__globals__[each]
            if not isinstance(value, ModuleType):
                self._look(value, each)
            elif not is_installed(getattr(value, "__file__", None) or ""):
                self._keep_places(vars(value), names & vars(value).keys())
                for inner in names & vars(value).keys():
                    self._look(vars(value)[inner], f"{each}.{inner}")
        for each, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._kept.append(_Cell(cell, each))
            self._look(_Cell.value(cell), each)
        self._look_at_each(dict(enumerate(function.__defaults__ or ())), name)
        self._look_at_each(dict(function.__kwdefaults__ or {}), name)

    def _keep_places(self, names: dict[str, Any], held: set[str]) -> None:
        self._kept.extend(_Place(names, each) for each in sorted(held))


class _Kept:
    """One thing, and what it was."""

    def __init__(self, thing: Any, name: str) -> None:
        self.thing, self.name = thing, name
        self.was = self.read()

    def read(self) -> Any:
        """Its state, apart from it."""
        raise NotImplementedError

    def put_back(self) -> None:
        raise NotImplementedError

    def is_as_it_was(self) -> bool:
        return bool(self.read() == self.was)

    def has_grown(self) -> bool:
        """Whether it has only more items than it had."""
        return False

    def inside(self) -> dict[Any, Any]:
        """What it holds."""
        return {}


class _Place(_Kept):
    """What a name of a module stands for."""

    def read(self) -> Any:
        return self.thing.get(self.name)

    def is_as_it_was(self) -> bool:
        return _same(self.read(), self.was)

    def put_back(self) -> None:
        self.thing[self.name] = self.was


class _Cell(_Kept):
    """What a name of an enclosing function stands for."""

    EMPTY = object()

    @classmethod
    def value(cls, cell: CellType) -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return cls.EMPTY

    def read(self) -> Any:
        return self.value(self.thing)

    def is_as_it_was(self) -> bool:
        return _same(self.read(), self.was)

    def put_back(self) -> None:
        if self.was is not self.EMPTY:
            self.thing.cell_contents = self.was


class _Dict(_Kept):
    def read(self) -> Any:
        return dict(self.thing)

    def is_as_it_was(self) -> bool:
        return self.thing.keys() == self.was.keys() and all(
            _same(value, self.was[key]) for key, value in self.thing.items()
        )

    def put_back(self) -> None:
        self.thing.clear()
        self.thing.update(self.was)

    def inside(self) -> dict[Any, Any]:
        return dict(self.was)


class _Attributes(_Dict):
    """Of an object of the user's own, or of a module or optimizer of torch's."""

    def __init__(self, thing: Any, name: str) -> None:
        super().__init__(vars(thing), name)


class _Items(_Kept):
    """Of a list or a deque."""

    def read(self) -> Any:
        return list(self.thing)

    def is_as_it_was(self) -> bool:
        same = len(self.thing) == len(self.was)
        return same and all(map(_same, self.thing, self.was))

    def has_grown(self) -> bool:
        return all(map(_same, self.thing, self.was)) and len(self.thing) >= len(self.was)

    def put_back(self) -> None:
        self.thing.clear()
        self.thing.extend(self.was)

    def inside(self) -> dict[Any, Any]:
        return dict(enumerate(self.was))


class _Set(_Kept):
    def read(self) -> Any:
        return set(self.thing)

    def put_back(self) -> None:
        self.thing.clear()
        self.thing.update(self.was)


class _Cache(_Kept):
    """Of functools: emptied, as what it has beside what it had cannot be told."""

    def read(self) -> Any:
        return self.thing.cache_info().currsize

    def has_grown(self) -> bool:
        return True

    def put_back(self) -> None:
        self.thing.cache_clear()


class _Tensor(_Kept):
    def read(self) -> Any:
        return self.thing.detach().clone(), self.thing.requires_grad, self.thing.grad

    def is_as_it_was(self) -> bool:
        value, requires, grad = self.was
        same = self.thing.requires_grad == requires and self.thing.grad is grad
        return same and self.thing.shape == value.shape and _equal(self.thing.detach(), value)

    def put_back(self) -> None:
        value, requires, grad = self.was
        with torch.no_grad():
            if self.thing.shape == value.shape:
                self.thing.copy_(value)
            else:
                self.thing.set_(value)
        if self.thing.is_leaf:
            self.thing.requires_grad_(requires)
        self.thing.grad = grad


class _Array(_Kept):
    def read(self) -> Any:
        return self.thing.copy()

    def is_as_it_was(self) -> bool:
        return self.thing.shape == self.was.shape and bool(
            self.thing.tobytes() == self.was.tobytes()
        )

    def put_back(self) -> None:
        self.thing[...] = self.was


class _Generator(_Kept):
    """Of random numbers."""

    def read(self) -> Any:
        if isinstance(self.thing, torch.Generator):
            return self.thing.get_state().tolist()
        if isinstance(self.thing, random.Random):
            return self.thing.getstate()
        return copy.deepcopy(self.thing.bit_generator.state)

    def is_as_it_was(self) -> bool:
        return repr(self.read()) == repr(self.was)

    def put_back(self) -> None:
        if isinstance(self.thing, torch.Generator):
            self.thing.set_state(torch.tensor(self.was, dtype=torch.uint8))
        elif isinstance(self.thing, random.Random):
            self.thing.setstate(self.was)
        else:
            self.thing.bit_generator.state = self.was


def _kept(value: Any, name: str) -> _Kept | None:
    """Its state now, of what can have one that matters here."""
    for kinds, kept in _KINDS:
        if isinstance(value, kinds):
            return kept(value, name)
    if isinstance(value, type | ModuleType) or not hasattr(value, "__dict__"):
        return None
    module = sys.modules.get(type(value).__module__)
    if module is None or is_installed(getattr(module, "__file__", None) or ""):
        return None  # a logger, a progress bar, a writer of event files
    return _Attributes(value, name)


_KINDS: tuple[tuple[Any, Callable[[Any, str], _Kept]], ...] = (
    (torch.Tensor, _Tensor),
    (np.ndarray, _Array),
    (dict, _Dict),
    ((list, deque), _Items),
    (set, _Set),
    ((torch.Generator, random.Random, np.random.Generator), _Generator),
    ((nn.Module, torch.optim.Optimizer), _Attributes),
)


def _same(one: Any, other: Any) -> bool:
    """Whether a name stands for the same: plain values by value, NaN included."""
    if one is other:
        return True
    if isinstance(one, PLAIN) and isinstance(other, PLAIN):
        return type(one) is type(other) and repr(one) == repr(other)
    return False


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return bool(torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def is_installed(file: str) -> bool:
    """Whether a module's file is Python's own, or of a package that was installed."""
    return file.startswith(_INSTALLED) or file.startswith("<frozen")
