"""Whether traced operations train what the model trains.

A trace keeps values, not meaning: autograd functions of the user's own, `no_grad` blocks, hooks,
counters, reassigned buffers and draws of random numbers can be lost while the outputs agree.
So a model is watched while it runs, and both are compared by what an update is made of: every
gradient, every buffer, and how many random numbers were drawn.
"""

from __future__ import annotations

import contextlib
import random
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.batchnorm import _NormBase

from paceline.local.single_pixel import MetWeights
from paceline.local.still import chance_kept

Context = Callable[[], contextlib.AbstractContextManager[Any]]
_DEPTH = 4
"""Objects inside of objects inside of an attribute that are looked at for changes."""
_ITEMS = 200
"""Entries of a list or dictionary that are looked at one by one; of a longer one, its length."""
_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Part of its norm by which a gradient may differ: the same operations, in the same order."""
_CLOSE_ROUNDED = 2e-2
"""The same where operations round to bf16."""
_STATE = ("_parameters", "_buffers", "_modules")


class UntraceableError(Exception):
    """A way of tracing does not give the model."""


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Run a model without changing its buffers (running statistics) or the random numbers."""
    kept = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    for owner, name, buffer in kept:
        owner._buffers[name] = buffer.clone()
    try:
        with chance_kept():
            yield
    finally:
        for owner, name, buffer in kept:
            owner._buffers[name] = buffer


def random_states() -> tuple[Any, ...]:
    """Where the global generators of torch, Python and NumPy are: equal if nothing was drawn."""
    _, key, place, *_ = np.random.get_state()
    return (
        bytes(torch.get_rng_state().numpy()),
        random.getstate(),
        np.asarray(key).tobytes(),
        place,
    )


# --- what a forward pass changes ------------------------------------------------


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[list[str]]:
    """What a forward pass does that the stages of a model could not keep, in words, at the end.

    Buffers are put back as they were, and so are the random numbers.
    """
    found: list[str] = []
    hooked: list[str] = []
    register = torch.Tensor.register_hook

    def noticed(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        hooked.append(getattr(hook, "__name__", type(hook).__name__))
        return register(tensor, hook)  # type: ignore[no-untyped-call]

    before = _attributes(model)
    buffers = {
        name: buffer
        for path, layer in model.named_modules()
        if not isinstance(layer, _NormBase)
        for name, buffer in layer.named_buffers(path, recurse=False)
    }
    with untouched(model):
        torch.Tensor.register_hook = noticed  # type: ignore[method-assign]
        try:
            yield found
        finally:
            torch.Tensor.register_hook = register  # type: ignore[method-assign]
        now = dict(model.named_buffers())
        moved = [n for n, b in buffers.items() if n not in now or not _equal(b, now[n])]
    after = _attributes(model)
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    if changed:
        found.append(f"its forward pass changes {changed[0]}")
    if moved:
        found.append(f"its forward pass changes the buffer {moved[0]}")
    if hooked:
        found.append(f"its forward pass registers the gradient hook {hooked[0]}")


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every layer, in a form that shows changes; parameters by their sum."""
    found: dict[str, Any] = {}
    for path, layer in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in vars(layer).items():
            if name not in _STATE:
                found[f"{prefix}{name}"] = _seen(value, _DEPTH)
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                total = repr(parameter.detach().sum().item())
                found[f"the parameter {prefix}{name}"] = _Same(parameter), total
    return found


class _Same:
    """Equal only to the same object, which it keeps, so that no other can take its address."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _seen(value: Any, depth: int) -> Any:
    """Something that differs when a value has changed, as far as one can see."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, torch.Tensor):
        return _Same(value), value._version
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, np.ndarray):
        return _Same(value), value.tobytes() if value.dtype != object else None
    if isinstance(value, type | types.FunctionType | types.ModuleType | nn.Module) or depth == 0:
        return _Same(value)
    if isinstance(value, list | tuple | set | frozenset | deque):
        inside = [_seen(entry, depth - 1) for entry in value] if len(value) <= _ITEMS else []
        fixed = isinstance(value, tuple | frozenset)
        return None if fixed else _Same(value), len(value), tuple(inside)
    if isinstance(value, Mapping):
        pairs = value.items() if len(value) <= _ITEMS else ()
        entries = [(_seen(k, depth - 1), _seen(v, depth - 1)) for k, v in pairs]
        return _Same(value), len(value), tuple(entries)
    attributes = getattr(value, "__dict__", None)
    return _Same(value), _seen(dict(attributes), depth - 1)[1:] if attributes else None


# --- what a training pass gives -------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """What one training pass gave: marks of it that are equal only if it was the same."""

    output: torch.Tensor
    gradients: dict[str, tuple[float, float, float] | None]
    """By parameter: norm, sum, and product with the parameter."""
    buffers: dict[str, torch.Tensor]
    draws: tuple[Any, ...]
    """The states of the random number generators afterwards."""
    rounded: bool
    """Operations round to bf16."""
    functions: Counter[str]
    """Autograd functions of the user's own that the backward pass goes through."""


def training_pass(
    module: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    sample: torch.Tensor,
    context: Context,
) -> Pass:
    """Run a module forward and backward and put everything back as it was."""
    with untouched(module):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        with context():
            rounded = torch.is_autocast_enabled(sample.device.type)
            output = module(sample.clone())  # which the module may overwrite
        output = output[0] if isinstance(output, tuple | list) else output
        if not isinstance(output, torch.Tensor):
            raise UntraceableError(f"it gives back a {type(output).__name__}, not a tensor")
        if not output.requires_grad:
            raise UntraceableError("it gives outputs that no parameter has part in")
        draws = random_states()
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        functions = _functions(output)
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        trained = {n: p for n, p in parameters.items() if p.requires_grad}
        found = torch.autograd.grad(
            output, list(trained.values()), direction.to(output), allow_unused=True
        )
    marks: dict[str, tuple[float, float, float] | None] = {
        name: None if gradient is None else _marks(gradient, parameter)
        for (name, parameter), gradient in zip(trained.items(), found, strict=True)
    }
    return Pass(output.detach(), marks, buffers, draws, rounded, functions)


@torch.no_grad()
def _marks(gradient: torch.Tensor, parameter: torch.Tensor) -> tuple[float, float, float]:
    product = (gradient * parameter).sum()
    return float(gradient.norm()), float(gradient.sum()), float(product)


def backward_nodes(output: torch.Tensor) -> set[Any]:
    """Every operation that the backward pass from `output` goes through."""
    waiting: list[Any] = [output.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


def _functions(output: torch.Tensor) -> Counter[str]:
    own = [
        type(node).__name__.removesuffix("Backward")
        for node in backward_nodes(output)
        if isinstance(node, BackwardCFunction) and type(node) is not MetWeights._backward_cls
    ]
    return Counter(own)


def compare(model: Pass, traced: Pass, parameters: Mapping[str, torch.Tensor]) -> None:
    lost = model.functions - traced.functions
    if lost:
        raise UntraceableError(
            f"it uses the autograd function {next(iter(lost))} of its own, whose backward pass is"
            " lost in tracing"
        )
    if model.draws != traced.draws:
        raise UntraceableError(
            "it draws random numbers in its forward pass that would be drawn only once, in tracing"
        )
    close = _CLOSE_ROUNDED if model.rounded else 1e-3
    if not torch.allclose(model.output, traced.output, rtol=close, atol=close / 10, equal_nan=True):
        raise UntraceableError("it gives other outputs when it is traced")
    if not all(np.isfinite(marks).all() for marks in model.gradients.values() if marks):
        raise UntraceableError(
            "it gives no finite gradients on made inputs, by which its trace could be judged"
        )
    for name, marks in model.gradients.items():
        found, parameter = traced.gradients[name], parameters[name]
        close = _CLOSE_ROUNDED if model.rounded else _CLOSE.get(parameter.dtype, _CLOSE_ROUNDED)
        if (marks is None) != (found is None) or (
            marks is not None and found is not None and not _alike(marks, found, parameter, close)
        ):
            raise UntraceableError(
                f"it gives another gradient of {name} when it is traced (no_grad blocks, hooks and"
                " autograd functions are lost in tracing)"
            )
    for name, buffer in model.buffers.items():
        other = traced.buffers.get(name)
        if other is not None and not torch.allclose(
            buffer.double(), other.double(), rtol=1e-3, atol=1e-4, equal_nan=True
        ):
            raise UntraceableError(f"it gives another buffer {name} when it is traced")


def _alike(
    one: tuple[float, ...], other: tuple[float, ...], parameter: torch.Tensor, close: float
) -> bool:
    # By how much each mark may move when the gradient moves by `close` of its norm.
    size = one[0] * parameter.numel() ** 0.5
    limits = (one[0], size, one[0] * float(parameter.detach().norm()))
    return all(abs(a - b) <= close * x + 1e-12 for a, b, x in zip(one, other, limits, strict=True))
