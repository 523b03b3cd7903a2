"""What optimizers keep, as JSON and tensors beside it, and back exactly as it was.

Numbers, texts and None stand for themselves; everything else is a table with one key, its kind:
`{"tuple": [0.9, 0.999]}`, `{"tensor": "|0"}`. Tensors lie in a file of their own under that name.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]

NESTED = "|"
"""How the names of tensors begin that are parts of a larger value."""
_ROWS: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set}
_TABLES: dict[str, type[Any]] = {"dict": dict, "ordered": OrderedDict}


class CannotPackError(TypeError):
    """A value that is none of what is known here; its text names the kind."""


def pack(value: Any, tensors: Tensors) -> Any:
    """JSON for `value`; its tensors are added to `tensors`.

    >>> pack({"betas": (0.9, None)}, {})
    {'dict': [['betas', {'tuple': [0.9, None]}]]}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value.detach(), tensors)
    for kind, row in _ROWS.items():
        if type(value) is row:
            return {kind: [pack(item, tensors) for item in value]}
    for kind, table in _TABLES.items():
        if type(value) is table:
            return {kind: [[pack(k, tensors), pack(v, tensors)] for k, v in value.items()]}
    if type(value) is deque:
        return {"deque": [value.maxlen, [pack(item, tensors) for item in value]]}
    if isinstance(value, np.generic):
        return {"number": [value.dtype.str, pack(value.item(), tensors)]}
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise CannotPackError(type(value).__name__)


def unpack(data: Any, tensors: Tensors) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind in _ROWS:
        return _ROWS[kind](unpack(item, tensors) for item in content)
    if kind in _TABLES:
        return _TABLES[kind]((unpack(k, tensors), unpack(v, tensors)) for k, v in content)
    if kind == "deque":
        return deque((unpack(item, tensors) for item in content[1]), maxlen=content[0])
    if kind == "number":
        return np.dtype(content[0]).type(unpack(content[1], tensors))
    if kind == "complex":
        return complex(*content)
    if kind == "dtype":
        return _dtype(content)
    if kind == "device":
        return torch.device(content)
    return _unpack_tensor(kind, content, tensors)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of numbers")
    return found


def can_pack(value: Any) -> bool:
    """Whether `pack` knows what to do with it."""
    try:
        pack(value, {})
    except CannotPackError:
        return False
    return True


def _pack_tensor(tensor: torch.Tensor, tensors: Tensors) -> Any:
    if tensor.layout is torch.sparse_coo:
        # As it is: adding up entries of the same place now would round otherwise than later.
        parts = [tensor._indices(), tensor._values()]
        packed = [_pack_tensor(part, tensors) for part in parts]
        return {"sparse": [*packed, list(tensor.shape), tensor.is_coalesced()]}
    if tensor.layout is not torch.strided:
        raise CannotPackError(f"tensor with the layout {tensor.layout}")
    name = f"{NESTED}{len(tensors)}"
    if tensor.dtype is torch.complex128:  # safetensors has no such numbers
        tensors[name] = torch.view_as_real(tensor.resolve_conj())
        return {"complex128": name}
    tensors[name] = tensor
    return {"tensor": name}


def _unpack_tensor(kind: str, content: Any, tensors: Tensors) -> torch.Tensor:
    if kind == "tensor":
        return tensors[content]
    if kind == "complex128":
        return torch.view_as_complex(tensors[content].contiguous())
    if kind == "sparse":
        indices, values = (unpack(part, tensors) for part in content[:2])
        return torch.sparse_coo_tensor(
            indices, values, content[2], is_coalesced=content[3], check_invariants=True
        )
    raise ValueError(f"{kind!r} is no kind of value")
