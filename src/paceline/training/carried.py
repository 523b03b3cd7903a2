"""What a model carries from one batch to the next besides its parameters.

A recurrent model may keep its hidden state as an attribute or as a buffer, another may count its
calls. In plain PyTorch that stays on the object; here several objects train one after the other
(legs, resumed runs), and evaluations use the one that trains. See docs/python.md.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from paceline.errors import UnsupportedError
from paceline.local.base import OptimizerState
from paceline.local.packing import can_pack

CARRIED = ".carried"
"""Under which it stands beside the optimizer's state: no parameter's name begins with a dot."""
RUNNING = ("running_mean", "running_var", "num_batches_tracked")
"""What normalising layers keep of the batches that they have seen."""
_BUFFERS = "buffers"
"""Whether buffers change from batch to batch; names of attributes have a dot."""
_NUMBERS = (bool, int, float)
_ABSENT = object()
_MUTABLE = (list, tuple, dict, torch.Tensor)
"""What may hold something else although it is the same object."""


@dataclass(frozen=True)
class _Place:
    """An attribute of a module, or a buffer that no state_dict has."""

    name: str
    space: dict[str, Any]
    key: str

    def look(self) -> _Seen | None:
        """What is there, if it is plain: numbers, tensors, and tables or lists of them."""
        value = self.space.get(self.key, _ABSENT)
        if type(value) in _NUMBERS:  # as most are
            return _Seen([value], None, [0])
        leaves, form = tree_flatten(value)
        if not all(map(_is_plain, leaves)):
            return None
        versions = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
        return _Seen(leaves, form, versions)


@dataclass(frozen=True)
class _Seen:
    """A value as it was; tensors are not copied, but it shows whether they have changed."""

    leaves: list[Any]
    form: Any
    versions: list[int]

    @property
    def has_tensors(self) -> bool:
        """Whether it may be a state of samples; a list of single losses is none."""
        return any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in self.leaves)

    @property
    def is_number(self) -> bool:
        return len(self.leaves) == 1 and type(self.leaves[0]) in _NUMBERS

    def is_like(self, other: _Seen) -> bool:
        if self.form != other.form or self.versions != other.versions:
            return False
        return all(
            a is b if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else a == b
            for a, b in zip(self.leaves, other.leaves, strict=True)
        )

    @property
    def value(self) -> Any:
        """The value again; its tensors are those that were seen."""
        return self.leaves[0] if self.form is None else self.form.unflatten(self.leaves)

    @property
    def is_intact(self) -> bool:
        """Whether its tensors still have the values that they had."""
        pairs = zip(self.leaves, self.versions, strict=True)
        return all(not isinstance(leaf, torch.Tensor) or leaf._version == n for leaf, n in pairs)


def _is_plain(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        # What still has its graph belongs to the batch that is under way.
        return not isinstance(leaf, nn.Parameter) and not leaf.requires_grad
    return leaf is None or leaf is _ABSENT or type(leaf) in (*_NUMBERS, str)


@functools.cache
def _standard() -> frozenset[str]:
    """What every module has."""
    return frozenset(vars(nn.Module()))


def _places(model: nn.Module) -> Iterator[_Place]:
    for path, module in model.named_modules():
        if type(module).__module__.startswith("paceline."):
            continue  # a split layer has its whole weights there, to evaluate with
        own = module.__dict__
        for key in own.keys() - _standard():
            yield _Place(_name(path, key), own, key)
        for key in module._non_persistent_buffers_set:
            yield _Place(_name(path, key), module._buffers, key)


def _name(path: str, key: str) -> str:
    return f"{path}.{key}"  # of the model itself with a dot first


def _copied(value: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, value)


def _placed(value: Any, model: nn.Module) -> Any:
    """A copy where the model is."""
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, _copied(value))


class Carried:
    """What one model carries, since it was made."""

    def __init__(self, model: nn.Module, fresh: Callable[[], nn.Module]) -> None:
        """`model` as it was made; `fresh` makes another one."""
        self._model, self._fresh = model, fresh
        self._first = {place.name: place.look() for place in _places(model)}
        self._fixed = {place.name: place.space[place.key] for place in _places(model)}
        """Objects as they were found: what is no container and still the same has not changed."""
        self._changes_buffers = False
        self._buffers: list[tuple[dict[str, Any], str, Any, int]] = []

    def begin(self) -> None:
        """Before updates: remember buffers, so that it shows whether updates change them."""
        self._buffers = [
            (module._buffers, key, buffer, buffer._version)
            for module in self._model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
            and key not in RUNNING
            and key not in module._non_persistent_buffers_set
        ]

    @property
    def changes_buffers(self) -> bool:
        """Whether batches change buffers other than running statistics."""
        self._changes_buffers = self._changes_buffers or any(
            space[key] is not buffer or buffer._version != version
            for space, key, buffer, version in self._buffers
        )
        return self._changes_buffers

    @property
    def has_attributes(self) -> bool:
        """Whether anything is carried that neither a state_dict nor `buffers()` has."""
        return any(seen.has_tensors or seen.is_number for _, seen in self._changed())

    @property
    def is_there(self) -> bool:
        """Whether anything of several numbers is carried: such a model may want batches alike."""
        return self.changes_buffers or any(seen.has_tensors for _, seen in self._changed())

    def _changed(self) -> Iterator[tuple[_Place, _Seen]]:
        for place in _places(self._model):
            value, first = place.space[place.key], self._first.get(place.name)
            same = place.name in self._fixed and self._fixed[place.name] is value
            if same and not isinstance(value, _MUTABLE):
                continue
            seen = place.look()
            if seen is not None and (first is None or not seen.is_like(first)):
                yield place, seen

    def read(self) -> OptimizerState:
        """For a handover or a checkpoint; nothing where nothing is carried."""
        found = {
            place.name: place.space[place.key]
            for place, seen in self._changed()
            if (seen.has_tensors or seen.is_number) and can_pack(place.space[place.key])
        }
        changes = self.changes_buffers
        return {CARRIED: found | {_BUFFERS: changes}} if found or changes else {}

    def write(self, state: OptimizerState, copies: Sequence[nn.Module]) -> None:
        """Go on from what `read` gave; `copies`: all that train as one model."""
        saved = dict(state.get(CARRIED, {}))
        self._changes_buffers = bool(saved.pop(_BUFFERS, False)) or self._changes_buffers
        for model in copies:
            places = {place.name: place for place in _places(model)}
            modules = dict(model.named_modules())
            for name, value in saved.items():
                place = places.get(name)
                path, _, key = name.rpartition(".")
                if place is None and path in modules:  # made by the first batch
                    place = _Place(name, modules[path].__dict__, key)
                if place is None:
                    raise UnsupportedError(
                        f"the model has no {path} to which the carried {key} belongs: a run is"
                        " continued with the model that it began with"
                    )
                place.space[place.key] = _placed(value, model)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """A stretch of batches that is none of the training: it begins, and leaves, nothing.

        It begins with what a checkpoint has: buffers as they are, attributes as in a new model.
        """
        kept = []
        for place, seen in self._changed():
            first = self._first.get(place.name)
            if seen.has_tensors or (first is not None and first.has_tensors):
                kept.append((place.space, place.key, place.space[place.key]))
                self._put_first(place)
                if place.key in place.space:  # what the batches change must not be the first value
                    place.space[place.key] = _copied(place.space[place.key])
        copies = [
            (module._buffers, key, buffer, buffer.clone())
            for module in self._model.modules()
            for key, buffer in (module._buffers.items() if self.changes_buffers else ())
            if buffer is not None and key not in RUNNING
        ]
        try:
            yield
        finally:
            for place, seen in list(self._changed()):
                if seen.has_tensors:
                    self._put_first(place)
            with torch.no_grad():
                for space, key, buffer, values in copies:
                    space[key] = buffer.copy_(values)
            for space, key, value in kept:
                space[key] = value

    def _put_first(self, place: _Place) -> None:
        """The value that a new model has."""
        if place.name not in self._first:
            place.space.pop(place.key, None)
        elif (first := self._first[place.name]) is None:
            return  # something else than a state
        elif first.is_intact:
            place.space[place.key] = first.value
        else:
            found = {each.name: each for each in _places(self._fresh())}
            if place.name in found:
                place.space[place.key] = found[place.name].space[place.key]
