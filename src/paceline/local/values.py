"""What batches and outputs may be: tensors, alone or inside of anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def full_precision(outputs: Any) -> Any:
    """Outputs as the loss takes them: a loss summed in bf16 would lose most of its digits."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    return tree_map_only(torch.Tensor, full_precision, outputs)


def scored(model: nn.Module, inputs: torch.Tensor) -> Any:
    """The model's outputs for an evaluation, in which no gradients are kept.

    A model that takes derivatives itself (`autograd.grad` in its forward) gets them there too.
    """
    try:
        return model(inputs)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        outputs = model(inputs)
    return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)


def mapped(values: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with every tensor changed; what has a structure of its own stays.

    >>> mapped({"a": (torch.ones(1), "b")}, lambda tensor: tensor + 1)
    {'a': (tensor([2.]), 'b')}
    """
    if isinstance(values, torch.Tensor):
        return change(values)
    if isinstance(values, Mapping) and type(values) in (dict,):
        return {key: mapped(value, change) for key, value in values.items()}
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(mapped(value, change) for value in values))
    if type(values) in (list, tuple):
        return type(values)(mapped(value, change) for value in values)
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        changed = {
            each.name: mapped(getattr(values, each.name), change)
            for each in dataclasses.fields(values)
            if each.init
        }
        return dataclasses.replace(values, **changed)
    return values


def shapes_of(values: Any) -> str:
    """What a batch is, in words, for messages.

    >>> shapes_of([torch.ones(2, 3), torch.ones(2)])
    'inputs of shape [2, 3] and targets of shape [2]'
    >>> shapes_of({"a": torch.ones(2, 3), "b": 1})
    "a batch of {'a': [2, 3], 'b': int}"
    """
    if isinstance(values, tuple | list) and len(values) == 2:
        first, second = values
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            return f"inputs of shape {list(first.shape)} and targets of shape {list(second.shape)}"
    return f"a batch of {_shown(values)}"


def _shown(values: Any, depth: int = 3) -> str:
    if isinstance(values, torch.Tensor):
        return str(list(values.shape))
    if depth and isinstance(values, Mapping):
        inner = ", ".join(f"{k!r}: {_shown(v, depth - 1)}" for k, v in list(values.items())[:8])
        return f"{{{inner}}}"
    if depth and isinstance(values, tuple | list):
        return f"({', '.join(_shown(value, depth - 1) for value in list(values)[:8])})"
    return type(values).__name__
