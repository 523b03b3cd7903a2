"""Optimizers by name, and how the learning rate follows the batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from paceline.errors import ConfigError, PacelineError, UnsupportedError
from paceline.local.base import OptimizerFactory
from paceline.schema.config import OPTIMIZERS, Optimizer
from paceline.training import lean


def optimizer_factory(
    settings: Optimizer, custom: Callable[..., torch.optim.Optimizer] | None = None
) -> OptimizerFactory:
    """A function from parameters to an optimizer, as the settings (or the user) say."""

    def build(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        rate, decay = settings.learning_rate, settings.weight_decay
        # Fused where that is right (see `lean`): one pass over the weights instead of several
        # (AlexNet with momentum on two cores: 69 ms instead of 126).
        if custom is not None:
            return _build_custom(custom, parameters, rate)
        if settings.name == "sgd":
            return lean.SGD(
                parameters,
                lr=rate,
                momentum=settings.momentum,
                nesterov=settings.nesterov,
                weight_decay=decay,
                fused=True,
            )
        kind = lean.Adam if settings.name == "adam" else lean.AdamW
        return kind(parameters, lr=rate, weight_decay=decay, fused=True)

    return build


def is_elementwise(settings: Optimizer) -> bool:
    """True for the optimizers by name, which treat every weight by itself."""
    return settings.name in OPTIMIZERS


def without_effect(
    settings: Optimizer, custom: Callable[..., torch.optim.Optimizer] | None
) -> list[str]:
    """Settings that an optimizer of the user's own does not hear of, in a sentence each.

    >>> without_effect(Optimizer(learning_rate=0.1), lambda parameters: None)
    ["optimizer.learning_rate = 0.1 has no effect: the optimizer <lambda> takes no 'lr' or\
 'learning_rate'"]
    """
    if custom is None:
        return []
    called, found = _called(custom), []
    if settings.learning_rate != Optimizer().learning_rate and not _takes(custom):
        found.append(
            f"optimizer.learning_rate = {settings.learning_rate:g} has no effect: the optimizer"
            f" {called} takes no 'lr' or 'learning_rate'"
        )
    if settings.weight_decay:
        found.append(
            f"optimizer.weight_decay = {settings.weight_decay:g} has no effect: the optimizer"
            f" {called} decides that itself"
        )
    return found


def decides_rate(custom: Callable[..., Any] | None) -> bool:
    """Whether an optimizer of the user's own has a learning rate that no setting changes."""
    return custom is not None and not _takes(custom)


def _called(custom: Callable[..., Any]) -> str:
    return str(getattr(custom, "__qualname__", type(custom).__qualname__))


def _takes(custom: Callable[..., Any]) -> list[str]:
    """By which names it is told the learning rate."""
    try:
        names = set(inspect.signature(custom).parameters)
    except (TypeError, ValueError):
        names = set()
    return [key for key in ("learning_rate", "lr") if key in names]


def _build_custom(
    custom: Callable[..., torch.optim.Optimizer], parameters: Iterable[Any], rate: float
) -> torch.optim.Optimizer:
    extra = dict.fromkeys(_takes(custom), rate)
    called = _called(custom)
    try:
        optimizer = custom(parameters, **extra)
    except PacelineError:
        raise
    except (Exception, SystemExit) as error:
        said = "" if isinstance(error, SystemExit) else f": {' '.join(str(error).split())}"
        raise ConfigError(
            f"optimizer {called}: calling it with the model's parameters raised"
            f" {type(error).__name__}{said}; correct it, or name one that takes them"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer {called} gave {type(optimizer).__name__}: it must give a"
            " torch.optim.Optimizer"
        )
    if needs_closure(optimizer):
        raise UnsupportedError(
            f"optimizer {called}: {type(optimizer).__name__} computes the loss several times in one"
            " step (its step() needs a closure), which Paceline does not do: use one whose step()"
            " takes gradients, such as torch.optim.SGD or AdamW"
        )
    for group in optimizer.param_groups:
        given = group.get("lr")
        if not isinstance(given, int | float | torch.Tensor):
            raise UnsupportedError(
                f"optimizer {called}: {type(optimizer).__name__} has lr = {given!r}, but every"
                " group of parameters must have a number there, which schedules and proofs scale:"
                " give it one"
            )
    return optimizer


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it computes the loss itself, several times in one step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def batch_factor(settings: Optimizer, batch_size: int) -> float:
    """How much the rate grows with the batch: batch / reference batch, or its root."""
    if settings.reference_batch is None:
        return 1.0
    ratio = batch_size / settings.reference_batch
    return ratio if settings.scaling == "linear" else math.sqrt(ratio)
