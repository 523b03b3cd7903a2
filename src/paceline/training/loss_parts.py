"""Whether the loss of a batch is the mean of its parts' losses, by their weights.

It is asked in float64 where the user's code computes in it. A term of small weight that looks
across the batch (the balance of experts, a dice of all pixels) is less than what rounding does to
two updates in fp32, and trains other weights all the same.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from paceline.data.samples import Samples
from paceline.local.memory import MEMORY_PART, available_mb
from paceline.local.steps import Supervised
from paceline.local.still import still
from paceline.local.values import mapped
from paceline.training.reference import Drawn, Plainly, norm, real_numbers

COARSE = 0.001
"""Relative; sums of a few hundred losses in fp32 are 1e-6 apart, more where terms cancel."""
FINE = 1e-6
"""The same in float64, where only what the user's code rounds to fp32 in between is apart;"""
NOISE = 30.0
"""or so many times as far as the same samples in another order."""


class _Found(NamedTuple):
    """Of some samples."""

    loss: float
    weight: float | None
    """By what the loss is a mean; None for a sum."""
    dtype: torch.dtype
    gradient: torch.Tensor | None = None
    """In the same place for all parts of a batch."""


def loss_apart(
    step: Supervised, outputs: torch.Tensor, targets: torch.Tensor, sizes: Sequence[int]
) -> float:
    """How far the loss of a batch is from the mean of its parts' losses; 0 where it is rounding,
    or cannot be told. The larger of the relative errors of the loss and of its gradient.
    """
    if outputs.dtype is torch.float32:
        fine = _loss_apart(_in_float64(step), outputs.double(), _widened(targets), sizes)
        if fine is not None:
            return fine
    return _loss_apart(step, outputs, targets, sizes) or 0.0


def _in_float64(step: Supervised) -> Supervised:
    """The same, if its loss is a module that has weights of classes."""
    if not isinstance(step.loss, nn.Module):
        return step
    return dataclasses.replace(step, loss=copy.deepcopy(step.loss).double())


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _loss_apart(
    step: Supervised, outputs: torch.Tensor, targets: torch.Tensor, sizes: Sequence[int]
) -> float | None:
    rows = torch.arange(len(outputs))
    whole = _of_rows(step, outputs, targets, rows)
    turned = _of_rows(step, outputs, targets, rows.flip(0))
    parts = [_of_rows(step, outputs, targets, some) for some in torch.split(rows, list(sizes))]
    if whole is None or None in parts:
        return None
    if outputs.dtype is torch.float64 and whole.dtype is not torch.float64:
        return None  # rounded on the way
    return _apart(whole, [part for part in parts if part is not None], turned)


def _of_rows(
    step: Supervised, outputs: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor
) -> _Found | None:
    leaf = outputs.detach().clone().requires_grad_()
    try:
        with still():
            found = step.loss(leaf[rows], targets[rows])
        named = found if isinstance(found, Mapping) else {"loss": found}
        (gradient,) = torch.autograd.grad(named["loss"], leaf)
    except Exception:  # the user's own code, on outputs that its model did not give
        return None
    given = named.get("weight")
    if given is None:
        given = len(rows)
    weight = None if isinstance(given, str) else float(given)
    return _Found(float(named["loss"].detach()), weight, named["loss"].dtype, gradient)


def _apart(whole: _Found, parts: Sequence[_Found], turned: _Found | None) -> float | None:
    """None where the loss of the whole batch says nothing."""
    if not math.isfinite(_error(whole, 0.0, whole.gradient)):
        return None
    value, total = 0.0, 0.0
    gradient = None if whole.gradient is None else torch.zeros_like(whole.gradient)
    for part in parts:
        weight = 1.0 if part.weight is None else part.weight
        if weight == 0.0:  # nothing of it counts: its mean is 0 / 0
            continue
        value += part.loss * weight
        total += 0.0 if part.weight is None else weight
        if gradient is not None and part.gradient is not None:
            gradient += part.gradient * weight
    by = total or 1.0
    found = _error(whole, value / by, None if gradient is None else gradient / by)
    if not math.isfinite(found):
        return math.inf
    noise = 0.0 if turned is None else _error(whole, turned.loss, turned.gradient)
    limit = FINE if whole.dtype is torch.float64 else COARSE
    return found if found > max(limit, min(NOISE * noise, COARSE)) else 0.0


def _error(whole: _Found, value: float, gradient: torch.Tensor | None) -> float:
    found = abs(value - whole.loss) / (abs(whole.loss) or 1.0)
    if whole.gradient is None or gradient is None:
        return found
    apart = norm(gradient - whole.gradient) / (norm(whole.gradient) or math.inf)
    return math.nan if math.isnan(apart) else max(found, apart)


def step_apart(plainly: Plainly, batch: Drawn, sizes: Sequence[int]) -> float:
    """The same of a step of the user's own, whose outputs nobody sees: by its value alone."""
    for taking in (False, True):  # a step may take derivatives itself
        try:
            with torch.set_grad_enabled(taking):
                model = plainly.model(settled=True)
                whole, *parts = (
                    _value_of(plainly, model, each) for each in (batch.whole(), *batch.parts(sizes))
                )
                return _apart(whole, parts, None) or 0.0
        except RuntimeError:
            continue
    return 0.0


def step_apart_in_float64(plainly: Plainly, batch: Drawn, sizes: Sequence[int]) -> float:
    """The same by its gradients too, where the step and the model take float64, and memory does."""
    turned = Drawn(batch.source, batch.numbers[::-1].copy())
    try:
        model = plainly.model(settled=True)
        numbers = sum(each.numel() for each in model.parameters())
        # Itself, a copy for each call with its gradient, and the gradients that are kept.
        if 8e-6 * numbers * (len(sizes) + 5) > MEMORY_PART * available_mb():
            return 0.0
        model = model.double()
        for each in model.parameters():
            if each._backward_hooks:  # which belong to the gradient of the whole batch
                each._backward_hooks.clear()
        whole, back, *parts = (
            _gradient_of(plainly, model, samples)
            for samples in (batch.whole(), turned.whole(), *batch.parts(sizes))
        )
    except Exception:  # of the user's own code, which is made for its own type
        return 0.0
    if whole.dtype is not torch.float64:
        return 0.0
    return _apart(whole, parts, back) or 0.0


def _unused(plainly: Plainly, model: nn.Module) -> nn.Module:
    """A copy for one call, of which nothing is left to the next: a model may count its calls."""
    plainly.outside.restore()
    try:
        return copy.deepcopy(model)
    except Exception:  # it holds what cannot be copied
        return model


def _value_of(plainly: Plainly, model: nn.Module, samples: Samples) -> _Found:
    loss, weight, _ = plainly.loss(_unused(plainly, model), samples)
    return _Found(float(loss.detach()), weight, loss.dtype)


def _gradient_of(plainly: Plainly, model: nn.Module, samples: Samples) -> _Found:
    model = _unused(plainly, model)
    trained = [each for each in model.parameters() if each.requires_grad]
    wide = Samples(mapped(samples.values, _widened), samples.count)
    loss, weight, _ = plainly.loss(model, wide)
    with still():
        found = torch.autograd.grad(loss, trained, allow_unused=True)
    flat = [
        real_numbers(torch.zeros_like(parameter) if gradient is None else gradient)
        .double()
        .flatten()
        for parameter, gradient in zip(trained, found, strict=True)
    ]
    return _Found(float(loss.detach()), weight, loss.dtype, torch.cat(flat))
