"""Optimizer states by parameter name, whatever strategy holds them."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Iterable
from typing import Any

import torch

from paceline.errors import RunDirectoryError
from paceline.local.base import OptimizerState
from paceline.local.packing import can_pack

Named = Iterable[tuple[str, torch.Tensor]]

WHOLE = ".optimizer"
"""Where a state has what an optimizer of the user's own keeps beside its parameters: no parameter's
name begins with a dot."""


def read_state(optimizer: torch.optim.Optimizer, named: Named) -> OptimizerState:
    """The optimizer's state by parameter name (tensors not copied)."""
    result: OptimizerState = {}
    for name, parameter in named:
        entries = optimizer.state.get(parameter)
        if entries:
            result[name] = dict(entries)
    return result


def write_state(optimizer: torch.optim.Optimizer, named: Named, state: OptimizerState) -> None:
    """Give the optimizer a state that `read_state` gave, copying the tensors."""
    for name, parameter in named:
        if name in state:
            optimizer.state[parameter] = {
                key: _as_on(parameter, value) for key, value in state[name].items()
            }


def _as_on(parameter: torch.Tensor, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.shape != parameter.shape or value.layout is not torch.strided:
        return value.clone()  # counters stay where the optimizer made them
    return torch.empty_like(parameter, dtype=value.dtype).detach().copy_(value)


def unsaved_sentence(state: OptimizerState) -> str | None:
    """What of an optimizer of the user's own a state does not have, in words."""
    whole = state.get(WHOLE, {})
    if not whole.get("unsaved"):
        return None
    return (
        f"the optimizer {whole['kind']} keeps {', '.join(whole['unsaved'])} outside of its"
        " state_dict, which no checkpoint holds: a resumed run cannot be exact"
    )


class OwnOptimizer:
    """Everything that an optimizer of the user's own carries from update to update.

    State of parameters, values of groups (a schedule's place, a learned rate), what its
    `state_dict` adds, and plain values on the object itself. What else changes on the object
    cannot be saved and is named.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named: Named) -> None:
        self._optimizer = optimizer
        known = {id(parameter): name for name, parameter in named}
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._names = [known.get(id(p), f".{n}") for n, p in enumerate(self._parameters)]
        self._before = {key: self._print(value) for key, value in self._attributes().items()}
        self._groups_before = {
            (number, key): self._print(value)
            for number, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if not can_pack(value)
        }

    def read(self) -> OptimizerState:
        """The whole state; under `WHOLE` what belongs to no parameter."""
        found: dict[str, Any] = self._optimizer.state_dict()
        result: OptimizerState = {}
        other: dict[Any, Any] = {}
        for key, entries in found["state"].items():
            by_name = isinstance(entries, dict) and all(isinstance(name, str) for name in entries)
            if type(key) is int and by_name:
                result[self._names[key]] = dict(entries)
            else:
                other[key] = entries
        attributes, unsaved = self._changed_attributes()
        groups = []
        for number, group in enumerate(found["param_groups"]):
            values = {key: value for key, value in group.items() if key != "params"}
            groups.append({key: value for key, value in values.items() if can_pack(value)})
            unsaved += [
                key
                for key in values.keys() - groups[-1].keys()
                if self._print(values[key]) != self._groups_before.get((number, key))
            ]
        result[WHOLE] = {
            "groups": groups,
            "state": other,
            "extra": {k: v for k, v in found.items() if k not in ("state", "param_groups")},
            "attributes": attributes,
            "unsaved": unsaved,
            "kind": type(self._optimizer).__name__,
        }
        return result

    def write(self, state: OptimizerState) -> None:
        """Go on from what `read` gave."""
        optimizer, whole = self._optimizer, state.get(WHOLE)
        named = list(zip(self._names, self._parameters, strict=True))
        if whole is None:  # written before such things were saved
            write_state(optimizer, named, state)
            return
        current = optimizer.state_dict()["param_groups"]
        if len(current) != len(whole["groups"]):
            raise RunDirectoryError(
                f"the optimizer {type(optimizer).__name__} has {len(current)} groups of parameters,"
                f" but the checkpoint has {len(whole['groups'])}: a run is continued with the"
                " optimizer that it began with"
            )
        by_number = {n: state[name] for n, name in enumerate(self._names) if name in state}
        loaded: dict[str, Any] = {
            "state": {**by_number, **whole["state"]},
            "param_groups": [
                group | saved for group, saved in zip(current, whole["groups"], strict=True)
            ],
        }
        optimizer.load_state_dict(loaded | whole["extra"])
        kind = type(optimizer)
        if kind.load_state_dict is torch.optim.Optimizer.load_state_dict:
            write_state(optimizer, named, state)  # torch's own turns state into the weights' type
        for key, value in whole["attributes"].items():
            setattr(optimizer, key, value)

    def _attributes(self) -> dict[str, Any]:
        found = vars(self._optimizer)
        return {key: value for key, value in found.items() if key not in _standard_attributes()}

    def _changed_attributes(self) -> tuple[dict[str, Any], list[str]]:
        """Those that differ from the start and can be saved; the names of those that cannot."""
        changed = {
            key: value
            for key, value in self._attributes().items()
            if self._print(value) != self._before.get(key)
        }
        # A tensor may be one that lies in the state too, which a copy would not be.
        saved = {k: v for k, v in changed.items() if can_pack(v) and not _has_tensors(v)}
        unsaved = sorted(changed.keys() - saved.keys())
        if type(self._optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            unsaved = []  # whoever wrote a state_dict has thought of them
        return copy.deepcopy(saved), unsaved

    def _print(self, value: Any) -> bytes | None:
        """Something that changes when the value does; None where that cannot be told."""
        text = io.BytesIO()
        with contextlib.suppress(Exception):  # a class of the user's may raise anything
            _Printer(text, self._optimizer, self._parameters).dump(value)
            return text.getvalue()
        return None


class _Printer(pickle.Pickler):
    """Writes what is compared and never read: tensors by which they are and how often changed."""

    def __init__(self, text: io.BytesIO, optimizer: object, parameters: list[Any]) -> None:
        super().__init__(text)
        self._optimizer = optimizer
        self._numbers = {id(parameter): n for n, parameter in enumerate(parameters)}

    def persistent_id(self, item: Any) -> Any:
        if item is self._optimizer:
            return "optimizer"
        if isinstance(item, torch.Tensor):
            return self._numbers.get(id(item), (id(item), item._version))
        if isinstance(item, torch.Generator):
            return bytes(item.get_state().tolist())
        return None


@functools.cache
def _standard_attributes() -> frozenset[str]:
    """What every optimizer of torch has."""
    return frozenset(vars(torch.optim.Optimizer([torch.zeros(1)], {})))


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_tensors(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple):
        return any(_has_tensors(item) for item in value)
    return isinstance(value, torch.Tensor)
