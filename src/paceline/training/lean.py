"""Torch's optimizers without torch's compiler.

The methods of `torch.optim.Optimizer` are wrapped so that `torch.compile` leaves them alone, and
the wrappers import the compiler at their first call: about a second and 80 MB in every process,
also where nothing is ever compiled. Below are the same optimizers without the wrappers, and fused
only where torch's fused update gives what its plain one gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from paceline.errors import UnsupportedError

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)
_WRAPPED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
FUSED_TYPES = (torch.float32, torch.float64)
"""What torch's fused updates are right for: of bf16 and fp16 its SGD leaves 16 and more elements
where they are and its Adam rounds otherwise, and complex numbers it refuses."""


def lean(kind: type[Kind]) -> type[Kind]:
    """A subclass of `kind` that does the same without importing the compiler."""
    step = inspect.unwrap(kind.step)

    def without_gradients(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        # Whether a gradient is sparse, or late, shows only when it is there.
        for group in self.param_groups if self.defaults.get("fused") else ():
            group["fused"] = _can_be_fused(self, group["params"])
        with torch.no_grad():
            try:
                return step(self, closure)
            except RuntimeError as error:
                raise _explained(error, kind) from error

    methods: dict[str, Callable[..., Any]] = {
        name: inspect.unwrap(getattr(kind, name)) for name in _WRAPPED
    }
    made = type(kind.__name__, (kind,), {"step": without_gradients, **methods})
    return cast("type[Kind]", made)


def _can_be_fused(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> bool:
    trained: list[Any] = [p for p in parameters if p.grad is not None]
    if any(p.dtype not in FUSED_TYPES or p.grad.layout is not torch.strided for p in trained):
        return False
    # The fused SGD takes a first momentum for all parameters at once or for none.
    with_state = sum(p in optimizer.state for p in trained)
    return "momentum" not in optimizer.defaults or with_state in (0, len(trained))


def _explained(error: RuntimeError, kind: type[torch.optim.Optimizer]) -> Exception:
    """What torch says of sparse gradients, with what to do about it."""
    if "sparse" not in str(error).lower():
        return error
    return UnsupportedError(
        f"{kind.__name__} cannot train with sparse gradients ({error}): use optimizer.name = 'sgd'"
        " without weight decay, or make the layer with sparse=False"
    )


SGD = lean(torch.optim.SGD)
Adam = lean(torch.optim.Adam)
AdamW = lean(torch.optim.AdamW)
