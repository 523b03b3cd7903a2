"""Hooks that the user has put on parameters, where a batch is divided.

Autograd would run them on the gradient of every part, or not at all where a replica or a rounded
twin stands in for the parameter. Plain PyTorch runs them once per update, on the gradient of the
whole batch: so they are taken off the parameters and run here, on the sum.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, ValuesView
from typing import Any

import torch
from torch import nn

from paceline.errors import StrategyError

Hooks = Mapping[int, Callable[..., Any]]
_MODULE_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}


class GradientHooks:
    """The hooks of `Tensor.register_hook` and `register_post_accumulate_grad_hook` of a model."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._taken: dict[str, tuple[Any, Hooks, Hooks]] = {}
        for name, parameter in parameters.items():
            before = parameter._backward_hooks or {}
            after: Hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            if before or after:
                # The dictionaries live on: what a handle removes is no longer run.
                self._taken[name] = (parameter, before, after)
                self._put(parameter, {}, {})

    @staticmethod
    def _put(parameter: Any, before: Hooks, after: Hooks) -> None:
        parameter._backward_hooks = before or None
        # None would leave the old ones where they are.
        parameter._post_accumulate_grad_hooks = after or OrderedDict()

    @property
    def names(self) -> frozenset[str]:
        """The parameters that have hooks."""
        return frozenset(self._taken)

    @torch.no_grad()
    def run(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient of the whole batch as a parameter's hooks leave it."""
        parameter, before, after = self._taken[name]
        kept, parameter.grad = parameter.grad, None
        for hook in list(before.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        parameter.grad = gradient
        for hook in list(after.values()):
            hook(parameter)
        result: torch.Tensor | None = parameter.grad
        parameter.grad = kept
        return result

    def close(self) -> None:
        """Put the hooks back onto their parameters."""
        for parameter, before, after in self._taken.values():
            self._put(parameter, before, after)
        self._taken.clear()


def refuse_module_hooks(model: nn.Module, strategy: str, why: str) -> None:
    """Raise where a layer has hooks of the user's that a strategy would not run as they are."""
    for path, layer in model.named_modules():
        for attribute, kind in _MODULE_HOOKS.items():
            if getattr(layer, attribute):
                name = path or type(layer).__name__
                raise StrategyError(
                    f"the layer {name} has a {kind}, which local.strategy = {strategy!r} cannot"
                    f" keep ({why}): remove it, or use local.strategy = 'threads'"
                )


def refuse_shared_memory(model: nn.Module, what: str) -> None:
    """Raise where tensors of a model lie in its parameters, which are about to be moved."""
    places = [
        (*_reach(parameter), name)
        for name, parameter in model.named_parameters()
        if _has(parameter)
    ]
    others = [(*_reach(tensor), name) for name, tensor in _other_tensors(model) if _has(tensor)]
    ends, owner = 0, ""
    for start, end, name in sorted(places):
        if start < ends:
            raise StrategyError(_shared(name, owner, what))
        ends, owner = end, name
    for start, end, name in others:
        for first, last, parameter in places:
            if start < last and first < end:
                raise StrategyError(_shared(name, parameter, what))


def _other_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers, and tensors that are plain attributes of layers, alone or in a list."""
    yield from model.named_buffers()
    for path, layer in model.named_modules():
        for attribute, value in vars(layer).items():
            if f"{attribute}_orig" in layer._parameters:
                continue  # torch's own: computed anew before every pass
            held = value.values() if isinstance(value, dict) else value
            entries = held if isinstance(held, list | tuple | ValuesView) else [held]
            for entry in entries:
                # A parameter in a list of the user's own is the parameter itself.
                if isinstance(entry, torch.Tensor) and not isinstance(entry, nn.Parameter):
                    yield f"{path}.{attribute}" if path else attribute, entry


def _has(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.device.type != "meta"


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and after its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def _shared(name: str, owner: str, what: str) -> str:
    return (
        f"{name} lies in the memory of the parameter {owner}, and {what} would part them: make it"
        " the same parameter, or a copy, or use local.strategy = 'threads'"
    )
