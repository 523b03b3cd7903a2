"""Optimizer states by parameter name, whatever strategy holds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from paceline.errors import UnsupportedError
from paceline.local.base import OptimizerState

Named = Iterable[tuple[str, torch.Tensor]]


def read_state(optimizer: torch.optim.Optimizer, named: Named) -> OptimizerState:
    """The optimizer's state by parameter name (tensors not copied)."""
    result: OptimizerState = {}
    for name, parameter in named:
        entries = optimizer.state.get(parameter)
        if entries:
            result[name] = {key: _checked(optimizer, key, value) for key, value in entries.items()}
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
        return value
    if value.shape != parameter.shape:
        return value.clone()  # counters stay where the optimizer made them
    return torch.empty_like(parameter).copy_(value)


def _checked(optimizer: torch.optim.Optimizer, key: str, value: Any) -> Any:
    if value is None or isinstance(value, torch.Tensor | int | float | bool | str):
        return value
    raise UnsupportedError(
        f"the optimizer {type(optimizer).__name__} keeps {key!r} as {type(value).__name__}, which"
        " cannot be saved: use one whose state is tensors and numbers"
    )
