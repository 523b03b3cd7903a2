"""Two trainings of a few updates, tensor by tensor: how far they are apart, and whether too far.

What is compared is how far a tensor moved, not where it is: weights hardly move in two updates.

    weights            |found - expected|  <=  TOLERANCE |expected - start| + DIGITS |expected|
    optimizer's state  |found - expected|  <=  TOLERANCE |expected|

Norms of whole tensors, so that single weights whose gradient is nothing but rounding, which Adam
moves as far as any other, do not decide. Where a tensor fails, plain PyTorch is asked how far it
leads itself apart when the last digits of the weights are changed: a ReLU whose input is nothing
but rounding passes a gradient or does not. A few times as much is no difference of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from paceline.local.base import OptimizerState
from paceline.training.reference import ReferenceResult, moves, norm

TOLERANCE = {"fp32": 0.002, "bf16": 0.25}
"""Relative errors that are still the order of sums.

In fp32 they are about 1e-6 with SGD; Adam, which makes a step of full length of any gradient, makes
1e-5 to 1e-3 of them (mnist_cnn, ResNet-18, AlexNet). A fault of 0.5% is to be found. In bf16
a number has three digits, which every layer and every part rounds to: up to 0.13 was seen. What the
division of a batch does to the loss is compared in fp32 all the same (see `verdict`).
"""
DIGITS = 2.0**-22
"""What rounding the weights after each update adds, relative to them."""
SURE = 0.1
"""Gradients smaller than this part of the usual one of their tensor may be nothing but rounding."""
NOISE = 3.0
"""So many times what plain PyTorch leads itself apart by,"""
NOISE_MOST = 0.02
"""but no more than this, where rounding is not all there is:"""
NOISE_ALONE = 0.5
"""who is led apart this far moves by rounding alone, as Adam moves a weight without gradient."""


@dataclass(frozen=True)
class Difference:
    """A tensor that is not what it should be."""

    name: str
    """Of the weight or buffer."""
    entry: str
    """Of the optimizer's state; empty for the tensor itself."""
    error: float
    """Relative; infinite where it has no number, or other keys."""
    stands: bool = False
    """The reference moves it, and the plan does not."""

    @property
    def sentence(self) -> str:
        """What the plan does to it."""
        if self.stands:
            return f"leaves {self.name} where it was, which plain training moves"
        number = f" ({self.error:.2g})" if math.isfinite(self.error) else ""
        if self.entry:
            return f"gives another {self.entry} of the optimizer for {self.name}{number}"
        return f"gives other weights for {self.name}{number}"


@dataclass(kw_only=True)
class WeightComparison:
    """What came of comparing."""

    differences: list[Difference] = field(default_factory=list)
    tensors: int = 0
    largest: float = 0.0

    def note(self, difference: Difference, *, passed: bool) -> None:
        self.tensors += 1
        if passed:
            self.largest = max(self.largest, difference.error)
        else:
            self.differences.append(difference)


def compare(
    weights: dict[str, torch.Tensor],
    state: OptimizerState,
    expected: ReferenceResult,
    *,
    tolerance: float,
    nudged: Callable[[], list[ReferenceResult]] = list,
) -> WeightComparison:
    """All tensors of a training beside what was expected of them, the model's order.

    `nudged`: what plain trainings from slightly other weights come to; asked for where it matters.
    """
    found = _compare(weights, state, expected, tolerance, {})
    if not found.differences:
        return found
    noise: dict[tuple[str, str], float] = {}
    for other in nudged():
        shifted = {
            name: tensor - other.start[name] + expected.start[name] if moves(tensor) else tensor
            for name, tensor in other.weights.items()
        }
        for difference in _compare(shifted, other.state, expected, 0.0, {}).differences:
            key = (difference.name, difference.entry)
            noise[key] = max(noise.get(key, 0.0), difference.error)
    return _compare(weights, state, expected, tolerance, noise)


def _compare(
    weights: dict[str, torch.Tensor],
    state: OptimizerState,
    expected: ReferenceResult,
    tolerance: float,
    noise: dict[tuple[str, str], float],
) -> WeightComparison:
    result = WeightComparison()

    def limit(name: str, entry: str = "") -> float:
        own = noise.get((name, entry), 0.0)
        coarse = TOLERANCE["bf16"] if _is_coarse(expected.weights.get(name)) else tolerance
        return math.inf if own > NOISE_ALONE else max(coarse, min(NOISE * own, NOISE_MOST))

    for name, wanted in expected.weights.items():
        here = weights.get(name)
        if here is None or here.shape != wanted.shape:
            result.note(Difference(name, "", math.inf), passed=False)
        elif not moves(wanted):
            same = bool(torch.equal(here, wanted))
            result.note(Difference(name, "", 0.0 if same else math.inf), passed=same)
        else:
            sure = _sure(expected.state.get(name, {}), wanted)
            moved = norm((wanted - expected.start[name]) * sure)
            apart = norm((here - wanted) * sure)
            digits = max(DIGITS, torch.finfo(wanted.dtype).eps if _is_coarse(wanted) else 0.0)
            room = limit(name) * moved + digits * norm(wanted)
            stands = moved > digits * norm(wanted) and bool(torch.equal(here, expected.start[name]))
            difference = Difference(name, "", _relative(apart, moved), stands)
            result.note(difference, passed=apart <= room)
    for name in expected.state.keys() | state.keys():
        for entry, error in _state_errors(state.get(name, {}), expected.state.get(name, {})):
            difference = Difference(name, entry, error)
            result.note(difference, passed=error <= limit(name, entry))
    order = {name: number for number, name in enumerate(expected.weights)}
    result.differences.sort(key=lambda each: (bool(each.entry), order.get(each.name, 0)))
    return result


def _is_coarse(tensor: torch.Tensor | None) -> bool:
    """Whether its numbers have three digits only."""
    return tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16)


def _sure(state: dict[str, object], like: torch.Tensor) -> torch.Tensor | float:
    """1 for weights whose gradient is more than rounding, where the optimizer divides by it."""
    mean = state.get("exp_avg")
    if not isinstance(mean, torch.Tensor) or mean.shape != like.shape or not mean.numel():
        return 1.0
    usual = norm(mean) / math.sqrt(mean.numel())
    return (mean.abs() >= SURE * usual).to(like.dtype)


def _state_errors(here: dict[str, object], wanted: dict[str, object]) -> list[tuple[str, float]]:
    """Relative errors by entry. What is missing is what an optimizer begins with: zero.

    A weight that takes no part in updates has no state in plain PyTorch, and where weights are
    shared or cut into pieces one of zeros, with a counter that means nothing.
    """
    errors = []
    for entry in here.keys() | wanted.keys():
        ours, theirs = here.get(entry), wanted.get(entry)
        tensors = [each for each in (ours, theirs) if isinstance(each, torch.Tensor)]
        if any(each.dim() > 0 for each in tensors):
            a, b = (
                each if isinstance(each, torch.Tensor) else torch.zeros_like(tensors[0])
                for each in (ours, theirs)
            )
            fits = a.shape == b.shape
            errors.append((entry, _relative(norm(a - b), norm(b)) if fits else math.inf))
        elif wanted and here:
            same = ours is not None and theirs is not None and _number(ours) == _number(theirs)
            errors.append((entry, 0.0 if same else math.inf))
    return errors


def _number(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) else value


def _relative(apart: float, whole: float) -> float:
    if apart == 0.0:
        return 0.0
    return apart / whole if whole and math.isfinite(apart) else math.inf
