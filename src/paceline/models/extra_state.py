"""What modules save besides tensors (`get_extra_state`), kept in files without code.

A file of tensors also has a text. There stands, as JSON, the plain data that modules saved; tensors
inside it lie among the others, under the module's key and a number.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from paceline.errors import UnsupportedError

ENTRY = "extra_state"
"""The name of that text in the file."""


def separate(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """The tensors of a state dict, and the text that has the rest; None where there is none.

    >>> separate({"weight": torch.zeros(1), "_extra_state": (1, "two")})[1]
    {'extra_state': '{"_extra_state": {"tuple": [1, "two"]}}'}
    """
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        else:
            plain[key] = _encoded(value, key, tensors)
    return tensors, {ENTRY: json.dumps(plain)} if plain else None


def load_model(path: Path) -> dict[str, Any]:
    """The state dict of a file that was written from what `separate` gave."""
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get(ENTRY, "{}")
        tensors: dict[str, Any] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    inner: set[str] = set()
    try:
        plain = {key: _decoded(value, tensors, inner) for key, value in json.loads(text).items()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"its {ENTRY} is not what Paceline writes: {error}") from error
    return {key: value for key, value in tensors.items() if key not in inner} | plain


def has_extra_state(model: nn.Module) -> bool:
    """Whether any module saves more than parameters and buffers."""
    return any(type(m).get_extra_state is not nn.Module.get_extra_state for m in model.modules())


def check_extra_state(model: nn.Module) -> None:
    """Refuse, before hours of training, what a checkpoint could not hold."""
    if has_extra_state(model):
        separate(model.state_dict())


def _encoded(value: Any, key: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Plain data as it is; what JSON has no word for as a table with one entry, its kind."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, torch.Tensor):
        name = f"{key}|{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if kind is list:
        return [_encoded(each, key, tensors) for each in value]
    if kind in (tuple, set):
        return {kind.__name__: [_encoded(each, key, tensors) for each in value]}
    if kind in (dict, OrderedDict):
        pairs = [[_encoded(each, key, tensors) for each in pair] for pair in value.items()]
        return {kind.__name__: pairs}
    raise UnsupportedError(
        f"the model saves {kind.__name__} in {key!r} (get_extra_state), which a checkpoint without"
        " code cannot hold: return numbers, texts, tensors, and lists, tuples or dicts of them"
    )


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor], inner: set[str]) -> Any:
    """What `_encoded` was given; names of the tensors inside it are added to `inner`."""
    if isinstance(value, list):
        return [_decoded(each, tensors, inner) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        inner.add(content)
        return tensors[content]
    if kind == "float":
        return float(content)
    kinds = {"tuple": tuple, "set": set, "dict": dict, "OrderedDict": OrderedDict}
    return kinds[kind](_decoded(content, tensors, inner))
