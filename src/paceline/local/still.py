"""A model without chance: what it draws at random is a constant, the same for every sample.

Two trainings that divide a batch differently draw different numbers, and so have different weights
however right both are. To hold one against the other, draws are replaced where torch makes them,
below whatever asked for them: `nn.Dropout`, `functional.dropout`, an LSTM's own, noise on inputs.
A draw becomes its mean, so that dropout, which multiplies by draws of mean 1, changes nothing.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class _NoChance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces every operation of this thread that draws random numbers."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to be left alone by torch's compiler would import it: about a second

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        asked = func._schema.arguments
        given = {each.name: each.default_value for each in asked if each.has_default_value()}
        given |= dict(zip((each.name for each in asked), args, strict=False)) | kwargs
        constant = _CONSTANTS.get(func.overloadpacket)
        if constant is not None:
            found = constant(given)
            if found is not NotImplemented:
                return _put(func, given, found)
        # A draw of another kind: the same one whenever it is made.
        torch.default_generator.manual_seed(0)
        return func(*args, **kwargs)


def _put(func: Any, given: dict[str, Any], found: Any) -> Any:
    """A constant where the operation puts its draws: into a tensor in place, or into a new one."""
    if func.overloadpacket.__name__.endswith("_"):
        return given["self"].copy_(found)
    if given.get("out") is not None:
        return given["out"].copy_(found)
    return found


def _like(given: dict[str, Any], value: Any) -> torch.Tensor:
    return torch.full_like(given["self"], value)


def _made(given: dict[str, Any], value: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    options: dict[str, Any] = {"dtype": dtype, "device": given.get("device")}
    if isinstance(given.get("dtype"), torch.dtype):  # a default is a number
        options["dtype"] = given["dtype"]
    if given.get("out") is not None:
        return torch.full_like(given["out"], value)
    return torch.full(given["size"], value, **options)


def _bernoulli(given: dict[str, Any]) -> Any:
    chance = given.get("p")
    if chance is None:  # the tensor itself holds the chances
        return given["self"].clone()
    if isinstance(chance, torch.Tensor):
        return chance.to(given["self"].dtype).expand_as(given["self"]).clone()
    return _like(given, chance)


def _normal(given: dict[str, Any]) -> Any:
    mean, size = given.get("mean", 0.0), given.get("size")
    if isinstance(mean, torch.Tensor):
        return mean.clone()
    if size is not None:
        return _made(given, mean)
    like = given["self"] if "self" in given else given["std"]
    return torch.full_like(like, mean)


def _multinomial(given: dict[str, Any]) -> torch.Tensor:
    chances: torch.Tensor = given["self"]
    count = int(given["num_samples"])
    if given.get("replacement"):
        return chances.argmax(dim=-1, keepdim=True).expand(*chances.shape[:-1], count)
    return torch.topk(chances, count, dim=-1).indices


def _rrelu(given: dict[str, Any]) -> Any:
    """The slopes go into `noise` too, where the backward pass takes them from."""
    inputs, training = given["self"], given.get("training", False)
    if not training:
        return NotImplemented
    slope = (given.get("lower", 0.125) + given.get("upper", 1 / 3)) / 2
    slopes = torch.where(inputs <= 0, slope, 1.0).to(inputs.dtype)
    given["noise"].copy_(slopes)
    return inputs * slopes


def _native_dropout(given: dict[str, Any]) -> Any:
    if not given.get("train", True):
        return NotImplemented
    kept = 1.0 - given["p"]
    inputs = given["input"]
    return inputs / kept if kept else inputs * 0.0, torch.ones_like(inputs, dtype=torch.bool)


_CONSTANTS: dict[Any, Callable[[dict[str, Any]], Any]] = {
    aten.bernoulli: _bernoulli,
    aten.bernoulli_: _bernoulli,
    aten.rand: lambda given: _made(given, 0.5),
    aten.rand_like: lambda given: _like(given, 0.5),
    aten.uniform_: lambda given: _like(given, (given.get("from", 0.0) + given.get("to", 1.0)) / 2),
    aten.randn: lambda given: _made(given, 0.0),
    aten.randn_like: lambda given: _like(given, 0.0),
    aten.normal: _normal,
    aten.normal_: _normal,
    aten.randint: lambda given: _made(given, given.get("low", 0), torch.int64),
    aten.randint_like: lambda given: _like(given, given.get("low", 0)),
    aten.random_: lambda given: _like(given, given.get("from", 0)),
    aten.exponential_: lambda given: _like(given, 1.0 / given.get("lambd", 1.0)),
    aten.poisson: lambda given: given["self"].clone(),
    aten.randperm: lambda given: torch.arange(given["n"], device=given.get("device")),
    aten.multinomial: _multinomial,
    aten.rrelu_with_noise: _rrelu,
    aten.rrelu_with_noise_: _rrelu,
    aten.native_dropout: _native_dropout,
}
"""What the draws of an operation become, from its arguments by name."""


@contextlib.contextmanager
def still() -> Iterator[None]:
    """Run a model or a loss without chance, in this thread.

    Python's and NumPy's own draws cannot be told apart: they begin anew, the same in every block.
    """
    begin_draws_anew()
    with _NoChance():  # type: ignore[no-untyped-call]
        yield


def begin_draws_anew() -> None:
    """Put Python's and NumPy's generators where every `still` block begins."""
    random.seed(0)
    np.random.seed(0)


@contextlib.contextmanager
def chance_kept() -> Iterator[None]:
    """Leave all random numbers as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def settle(model: nn.Module) -> None:
    """Let layers that keep statistics of a batch (BatchNorm) use those they have, in place.

    Their weights are trained all the same.
    """
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and not layer.track_running_stats:
            shape, device = layer.num_features, next(model.parameters()).device
            layer.running_mean = torch.zeros(shape, device=device)
            layer.running_var = torch.ones(shape, device=device)
        if isinstance(layer, _NormBase) and layer.running_mean is not None:
            layer.eval()
