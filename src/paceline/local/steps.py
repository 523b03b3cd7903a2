"""Steps: what an update computes of some samples, and how parts of a batch make up the whole.

A step gives a loss l that is a mean, and the weight w by which it is one: the samples, or what a
step of the user's own returns (tokens, pixels, class weights). For parts 1 ... n of a global batch

    gradient = S(w_i dl_i) / S(w_i)

Each part adds w_i dl_i / t to the gradient, t being the samples of the global batch, and w_i to a
number that travels with the gradient; whoever has the sum of both multiplies by t / S(w_i), once.
Where weights are samples that is 1, and nothing is multiplied.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn

from paceline.errors import RAISED_BY, ConfigError, DataError, PacelineError
from paceline.local.values import full_precision, scored, shapes_of

Loss = Callable[[Any, Any], Any]
Sums = dict[str, tuple[float, float]]
"""By name: a sum, and how many it is a sum of."""
SUM: Literal["sum"] = "sum"
"""The weight of a loss that is no mean but a sum over samples."""
KEYS = ("loss", "weight")
"""What a step's dict means something by; anything else in it is reported."""


NO_WEIGHTS = (
    "the step returns a weight, which this exchange between hosts does not add up: use"
    " exchange.kind = 'allreduce' without compression, or a loss that is a mean over samples"
)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What a step gives."""

    loss: torch.Tensor
    weight: float | Literal["sum"] | None = None
    """By what the loss is a mean; None: by samples."""
    correct: float = math.nan
    """Samples that were classified correctly; NaN where there are no classes."""
    sums: Sums = field(default_factory=dict)
    """What else is to be reported."""

    def part_of(self, count: int, total: int) -> tuple[float, float]:
        """What the loss is multiplied with before the backward pass, and what that counts for.

        The second, added up over all parts, is `total` where nothing remains to be done.
        """
        if count == total:
            return 1.0, float(total)
        if self.weight is None:
            return count / total, float(count)
        if self.weight == SUM:
            return 1.0, float(count)
        return self.weight / total, self.weight

    def loss_and_weight(self, count: int) -> tuple[float, float]:
        """The sum that the loss is the mean of, and its weight; nothing where nothing counts."""
        value = float(self.loss.detach())
        if self.weight is None:
            return value * count, float(count)
        if self.weight == SUM:
            return value, float(count)
        return (value * self.weight, self.weight) if self.weight else (0.0, 0.0)


class Step(Protocol):
    """(model, values of some samples) -> what came of them."""

    @property
    def weighs(self) -> bool:
        """Whether weights other than numbers of samples may come of it."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """What it reports besides loss and accuracy; None where only calling it tells."""

    def __call__(self, model: nn.Module, values: Any) -> Measure: ...


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """The built-in step: a model of one input, a loss of its outputs and the targets."""

    loss: Loss
    """(outputs, targets) -> the mean over the samples, or what a step gives."""
    name: str = "cross_entropy"
    """What messages call the loss."""
    weighs: bool = False
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...] | None:
        return None if self.weighs else tuple(self.metrics)

    def __call__(self, model: nn.Module, values: Any) -> Measure:
        inputs, targets = values
        outputs = model(inputs) if model.training else scored(model, inputs)
        # A loss that is summed in bf16 would lose most of its digits.
        outputs = full_precision(outputs)
        if torch.is_autocast_enabled(targets.device.type):
            with torch.autocast(targets.device.type, enabled=False):
                return self.of(outputs, targets, top5=not model.training)
        return self.of(outputs, targets, top5=not model.training)

    def of(self, outputs: Any, targets: torch.Tensor, *, top5: bool = False) -> Measure:
        """What the loss and the metrics make of a model's outputs."""
        found = measured(self.loss(outputs, targets), f"loss {self.name!r}")
        sums = dict(found.sums)
        with torch.no_grad():
            for name, function in self.metrics.items():
                value = function(outputs, targets)
                sums[name] = sum_and_count(value, name, float(len(targets)), is_mean=True)
            if top5 and are_classes(outputs, targets):
                guesses = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
                hits = (guesses == targets.unsqueeze(1)).any(dim=1)
                sums["top5"] = (float(hits.sum()), float(len(targets)))
        return Measure(
            loss=found.loss,
            weight=found.weight,
            correct=count_correct(outputs, targets),
            sums=sums,
        )


@dataclass(frozen=True, kw_only=True)
class OwnStep:
    """A step of the user's own."""

    function: Callable[[nn.Module, Any], Any]
    name: str
    """What messages call it."""
    weighs: bool = True
    names: tuple[str, ...] | None = None

    def __call__(self, model: nn.Module, values: Any) -> Measure:
        found = self._called(model, values)
        return measured(found, f"the step {self.name}")

    def _called(self, model: nn.Module, values: Any) -> Any:
        try:
            return self.function(model, values)
        except RuntimeError as error:
            # A step that takes derivatives itself gets them in evaluations too.
            if torch.is_grad_enabled() or "does not require grad" not in str(error):
                raise
        with torch.enable_grad():
            return self.function(model, values)


def measured(found: Any, who: str) -> Measure:
    """What a step or a loss gave, of which is said what is wrong with it."""
    if isinstance(found, Measure):
        return found
    if not isinstance(found, Mapping):
        return Measure(loss=_loss(found, who))
    if "loss" not in found:
        raise ConfigError(f"{who} gave a dict without 'loss': put the loss under that name")
    weight = _weight(found["weight"], who) if found.get("weight") is not None else None
    by = None if weight is None or weight == SUM else float(weight)
    sums = {
        str(name): sum_and_count(value, str(name), by)
        for name, value in found.items()
        if name not in KEYS
    }
    return Measure(loss=_loss(found["loss"], who), weight=weight, sums=sums)


def _loss(value: Any, who: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        if value.requires_grad or not torch.is_grad_enabled():
            return value
        shown = "a number that no weight has a part in"
    elif isinstance(value, torch.Tensor):
        shown = f"a {value.dtype} tensor of shape {list(value.shape)}"
    else:
        shown = f"a {type(value).__name__}"
    raise ConfigError(
        f"{who} gave {shown}: it must give the mean over the samples, one number that comes of the"
        " model's outputs"
    )


def _weight(value: Any, who: str) -> float | Literal["sum"]:
    if isinstance(value, str) and value == SUM:
        return SUM
    try:
        number = _number(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        shown = f"{number:g}" if isinstance(value, int | float | torch.Tensor) else repr(value)
        raise ConfigError(
            f"{who} gave the weight {shown}: it must be a number of 0 or more, by which the loss is"
            " a mean (how many tokens, the sum of class weights), or 'sum' where the loss is a sum"
        )
    return number


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def sum_and_count(
    value: Any, name: str, weight: float | None, *, is_mean: bool = False
) -> tuple[float, float]:
    """What is reported under a name: of a pair a sum and its count, of a tensor all elements.

    Of one number: the sum over what `weight` counts (-1: the samples, which the caller knows), or
    the mean.
    """
    try:
        if isinstance(value, tuple | list) and len(value) == 2:
            return _number(value[0]), _number(value[1])
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return _number(value.sum()), float(value.numel())
        by = -1.0 if weight is None else weight
        return (_number(value) * by if is_mean else _number(value)), by
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"{name!r} is to be reported, but is a {type(value).__name__}: give a pair (sum,"
            " count), a tensor of values, or one number"
        ) from None


def has_gradient(loss: torch.Tensor, model: nn.Module) -> bool:
    """Whether a loss that counts for nothing, and so may be 0 / 0, has a gradient of zeros.

    `ignore_index` has one where all targets are ignored, a quotient of two sums has not.
    """
    if math.isfinite(float(loss.detach())):
        return True
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    found = torch.autograd.grad(loss * 0.0, weights, retain_graph=True, allow_unused=True)
    return all(each is None or bool(torch.isfinite(each).all()) for each in found)


@torch.no_grad()
def divide_by_weight(weights: Iterable[torch.Tensor], counted: float, total: int) -> None:
    """Finish gradients whose parts count for `counted` in all, instead of for all samples.

    Of a batch in which nothing counts there is no gradient, or one of zeros.
    """
    if counted in (0.0, float(total)):
        return
    for weight in weights:
        if weight.grad is not None:
            weight.grad.mul_(total / counted)


def with_samples(sums: Sums, count: int) -> Sums:
    """Sums whose count is the samples, of which a step does not know how many it has."""
    return {name: (s, float(count) if by == -1.0 else by) for name, (s, by) in sums.items()}


def added(first: Sums, second: Sums) -> Sums:
    """Both together.

    >>> added({"a": (1.0, 2.0)}, {"a": (1.0, 1.0), "b": (0.0, 1.0)})
    {'a': (2.0, 3.0), 'b': (0.0, 1.0)}
    """
    found = dict(first)
    for name, (total, count) in second.items():
        before = found.get(name, (0.0, 0.0))
        found[name] = (before[0] + total, before[1] + count)
    return found


def are_classes(outputs: Any, targets: Any) -> bool:
    """Whether outputs are scores of classes and targets their numbers, so that accuracy exists."""
    return (
        isinstance(outputs, torch.Tensor)
        and isinstance(targets, torch.Tensor)
        and outputs.dim() == 2
        and outputs.shape[1] > 1
        and targets.shape == outputs.shape[:1]
        and not (targets.is_floating_point() or targets.is_complex())
    )


def count_correct(outputs: Any, targets: torch.Tensor) -> float:
    """How many samples the model got right; NaN, as every sum over it, where there are no classes.

    >>> count_correct(torch.eye(3), torch.tensor([0, 1, 0]))
    2.0
    """
    if not are_classes(outputs, targets):
        return math.nan
    return float((outputs.detach().argmax(dim=1) == targets).sum().item())


@contextlib.contextmanager
def users_code(step: Step, model: nn.Module, values: Any, count: int) -> Iterator[None]:
    """Say of an error that it came out of the model, the loss or the step, and on what."""
    who = "the model or the loss"
    if isinstance(step, OwnStep):
        who = f"the step {step.name} or the model"
    try:
        yield
    except Exception as error:
        if isinstance(error, PacelineError):
            raise
        if count == 1 and is_about_one_sample(error):
            raise DataError(one_sample(error)) from error
        weights = next((p.dtype for p in model.parameters()), None)
        pair = isinstance(values, tuple | list) and len(values) == 2
        inputs = values[0] if pair and isinstance(values[0], torch.Tensor) else None
        other = inputs is not None and weights is not None and inputs.dtype != weights
        if isinstance(error, RuntimeError) and "type" in str(error) and other:
            assert inputs is not None
            reason = " ".join(str(error).split())
            raise DataError(
                f"the model's weights are {weights} and its inputs {inputs.dtype}, which do not go"
                f" together ({reason}): let the dataset give {weights}, as x.float() does (bytes"
                " also divided by 255, as a rule), or convert them in the model"
            ) from error
        error.add_note(f"{RAISED_BY}{who}, on {shapes_of(values)}")
        raise


def is_about_one_sample(error: BaseException) -> bool:
    """Whether BatchNorm says that a single sample has no variance."""
    return isinstance(error, ValueError) and "more than 1 value per channel" in str(error)


def one_sample(error: BaseException) -> str:
    """What to do where a whole batch is one sample that BatchNorm cannot normalise."""
    reason = str(error).split("\n")[0]
    return (
        f"a batch of 1 sample cannot be normalised by BatchNorm ({reason}): choose a"
        " workload.batch_size that leaves no single sample at the end of an epoch, or leave one"
        " sample out with data.limit"
    )
