"""Torch's optimizers without torch's compiler.

The methods of `torch.optim.Optimizer` are wrapped so that `torch.compile` leaves them alone, and
the wrappers import the compiler at their first call: about a second and 80 MB in every process,
also where nothing is ever compiled. Below are the same optimizers without the wrappers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)
_WRAPPED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def lean(kind: type[Kind]) -> type[Kind]:
    """A subclass of `kind` that does the same without importing the compiler."""
    step = inspect.unwrap(kind.step)

    def without_gradients(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        with torch.no_grad():
            return step(self, closure)

    methods: dict[str, Callable[..., Any]] = {
        name: inspect.unwrap(getattr(kind, name)) for name in _WRAPPED
    }
    made = type(kind.__name__, (kind,), {"step": without_gradients, **methods})
    return cast("type[Kind]", made)


SGD = lean(torch.optim.SGD)
Adam = lean(torch.optim.Adam)
AdamW = lean(torch.optim.AdamW)
