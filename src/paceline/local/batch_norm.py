"""BatchNorm over the whole global batch, however the batch is divided.

Of each part travel, per channel and in float64, the count, the sum and the sum of squares of its
values; in the backward pass the two sums that the gradient needs:

    forward    mean = S(x) / n        variance = S(x^2) / n - mean^2       (n, S: over all parts)
    backward   dx = w / s ( dy - S(dy) / n - x' S(dy x') / n ),   x' = (x - mean) / s

A part's own mean and variance are taken first and turned into sums in float64: their difference
then costs no digit of fp32. The layers stay the user's: while a part computes, what they (or a
function of the user's) ask of `functional.batch_norm` in training mode is answered here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.overrides import TorchFunctionMode

from paceline.errors import StrategyError
from paceline.local.part_sums import (
    FIRST,
    NodesOnly,
    PartSums,
    RankSums,
    ThreadSums,
    shared_capacity,
)

if TYPE_CHECKING:
    from paceline.local.base import Job

aten = torch.ops.aten
_FUNCTIONAL = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum")
_OPERATOR = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum")
_SIGNATURES: dict[Any, tuple[str, ...]] = {
    functional.batch_norm: (*_FUNCTIONAL, "eps"),
    torch.batch_norm: (*_OPERATOR, "eps", "cudnn_enabled"),
    aten.batch_norm.default: (*_OPERATOR, "eps", "cudnn_enabled"),
}
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("running_mean", "running_var", "weight", "bias")),
    "training": False,
    "momentum": 0.1,
    "eps": 1e-5,
}


ALLOW = 'or allow those of each part with numerics.allow = ["local_batch_norm"]'
"""What else can be done where the statistics of the whole batch cannot be had."""
UNWATCHED = 600.0
"""Seconds after which a thread no longer waits for another, where nobody has set a deadline."""


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The layers that normalise over the samples of a batch."""
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]


def refuse_own_forward(model: nn.Module) -> None:
    """A BatchNorm of the user's own may compute anything from the part that it sees."""
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and not _is_known(layer):
            raise StrategyError(
                f"{name} ({type(layer).__name__}) is a BatchNorm with a forward of its own, which"
                " would see parts of a batch: use local.strategy = 'threads' on one machine,"
                f" {ALLOW}"
            )


def refuse_without_sums(model: nn.Module) -> None:
    """Of an exchange in which nodes cannot add up statistics (parameter servers)."""
    if batch_norms(model):
        raise StrategyError(
            "BatchNorm normalises by the whole batch, but this exchange between hosts adds up no"
            f" statistics: use exchange.kind = 'allreduce', {ALLOW}"
        )


def _is_known(layer: _BatchNorm) -> bool:
    forward = getattr(layer.forward, "__func__", None)
    return forward in (_BatchNorm.forward, SyncBatchNorm.forward)


def use_plain_synchronised(model: nn.Module) -> None:
    """Let a SyncBatchNorm compute on the CPU, where its own code refuses, as a BatchNorm does."""
    for layer in model.modules():
        if type(layer) is SyncBatchNorm:
            vars(layer)["forward"] = _BatchNorm.forward.__get__(layer)


def whole_batch(
    job: Job, model: nn.Module, *, group: Sequence[int] = (0,), replicas: int = 1
) -> WholeBatch | None:
    """How this rank's layers come to the statistics of the whole batch; None where none need to.

    `group`: the ranks of the node that compute the same layers; `replicas`: threads that do.
    Every rank of the node calls it.
    """
    layers = batch_norms(model)
    divided = job.nodes > 1 or len(group) > 1 or replicas > 1
    if job.local_batch_norm or not layers or not divided:
        return None
    refuse_own_forward(model)
    if job.compile:
        raise StrategyError(
            "numerics.compile = true does not go with a BatchNorm whose batch is divided among"
            f" hosts or ranks: leave it out, {ALLOW}"
        )
    if job.nodes > 1 and job.context.is_leader and job.node_sums is None:
        refuse_without_sums(model)
    if len(group) == job.context.local_size == 1:
        parts: PartSums = NodesOnly(job.node_sums)
        if replicas > 1:
            parts = ThreadSums(replicas, deadline=_deadline(job), nodes=job.node_sums)
        return WholeBatch(parts)
    assert job.board is not None
    assert job.arena is not None
    return WholeBatch(
        RankSums(
            job.board,
            job.arena,
            group,
            capacity=shared_capacity(layers),
            nodes=job.node_sums,
            several_nodes=job.nodes > 1,
        )
    )


def _deadline(job: Job) -> float:
    return job.board.deadline if job.board is not None else UNWATCHED


class WholeBatch:
    """BatchNorm's statistics over all parts of a batch, on one part."""

    def __init__(self, sums: PartSums) -> None:
        self.sums = sums

    @contextlib.contextmanager
    def update(self, model: nn.Module) -> Iterator[None]:
        """The forward and backward pass of a part that has samples."""
        with self.sums.update(lambda: _statistics(model)), BatchNormMode(self.sums, model):
            yield

    @torch.no_grad()
    def join(self, model: nn.Module) -> None:
        """The same for a part without samples, which takes over running statistics."""
        found, at = self.sums.join(), 0
        for tensor in _tracked(model):
            tensor.copy_(found[at : at + tensor.numel()].view(tensor.shape))
            at += tensor.numel()


def _tracked(model: nn.Module) -> list[torch.Tensor]:
    return [
        tensor
        for layer in batch_norms(model)
        for tensor in (layer.running_mean, layer.running_var, layer.num_batches_tracked)
        if tensor is not None
    ]


def _statistics(model: nn.Module) -> torch.Tensor:
    empty = torch.zeros(0, dtype=torch.float64)
    return torch.cat([empty, *(t.reshape(-1).double().cpu() for t in _tracked(model))])


class BatchNormMode(TorchFunctionMode):
    """Answers what this thread asks of BatchNorm in training mode; all else goes its way."""

    def __init__(self, sums: PartSums, model: nn.Module) -> None:
        super().__init__()
        self._sums = sums
        # Layers are told apart by their tensors: the function sees nothing else of them.
        tensors = [*model.parameters(), *model.buffers()]
        self._numbers = {id(tensor): number for number, tensor in enumerate(tensors, start=1)}

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        names = _SIGNATURES.get(func)
        if names is None:
            return func(*args, **(kwargs or {}))
        given = _DEFAULTS | dict(zip(names, args, strict=False)) | (kwargs or {})
        if not given["training"]:
            return func(*args, **(kwargs or {}))
        known = (given["weight"], given["running_mean"])
        number = next((self._numbers[id(t)] for t in known if id(t) in self._numbers), 0)
        return _WholeBatchNorm.apply(  # type: ignore[no-untyped-call]
            given["input"],
            given["weight"],
            given["bias"],
            given["running_mean"],
            given["running_var"],
            given["momentum"],
            given["eps"],
            lambda values, backward: self._sums.add(FIRST + 2 * number + backward, values),
        )


Add = Callable[[torch.Tensor, bool], torch.Tensor]
"""A vector added up over all parts; whether in the backward pass."""


class _WholeBatchNorm(torch.autograd.Function):
    """Of one part of a batch, by the statistics of all."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        momentum: float,
        eps: float,
        add: Add,
    ) -> torch.Tensor:
        own = _sums_of(inputs)
        total = add(own, False)
        count = float(total[0])
        if count <= 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size"
                f" {inputs.size()} in all parts together"
            )
        mean, square = (total[1:] / count).view(2, -1)
        variance = (square - mean * mean).clamp_(min=0.0)
        _track(running_mean, mean, momentum)
        _track(running_var, variance * (count / (count - 1)), momentum)
        kind = _wide(inputs.dtype)
        mean, variance = mean.to(inputs.device, kind), variance.to(inputs.device, kind)
        ctx.save_for_backward(inputs, weight, mean, variance)
        ctx.eps, ctx.count, ctx.add = eps, count, add
        return _transformed(inputs, weight, bias, mean, variance, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        inputs, weight, mean, variance = ctx.saved_tensors
        rest = (None,) * 5
        scale = torch.ones_like(mean) if weight is None else weight
        if inputs.numel():
            # In evaluation mode the statistics are constants: these two are then sums of this part.
            _, dot, own = aten.native_batch_norm_backward(
                gradient, inputs, scale, mean, variance, None, None, False, ctx.eps,
                [False, True, True],
            )  # fmt: skip
        else:
            dot, own = torch.zeros_like(mean), torch.zeros_like(mean)
        own_weight = dot if ctx.needs_input_grad[1] else None
        own_bias = own if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, own_weight, own_bias, *rest
        total = ctx.add(torch.cat([own.double().cpu(), dot.double().cpu()]), True)
        mean_own, mean_dot = (total / ctx.count).to(mean.device).view(2, -1)
        deviation = (variance.double() + ctx.eps).rsqrt()
        slope = scale.double() * deviation
        # a dy + b (x - mean) + c: the last two in one go over the inputs.
        found = _transformed(
            inputs,
            (-slope * deviation * mean_dot).to(mean.dtype),
            (-slope * mean_own).to(mean.dtype),
            mean,
            torch.ones_like(mean),
            0.0,
        )
        shape = [1, -1] + [1] * (inputs.dim() - 2)
        found.addcmul_(gradient, slope.to(found.dtype).view(shape))
        return found, own_weight, own_bias, *rest


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type of statistics: three digits would not do."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _sums_of(inputs: torch.Tensor) -> torch.Tensor:
    """Count, sum and sum of squares by channel, of this part alone."""
    channels = inputs.shape[1]
    if not inputs.numel():
        return torch.zeros(1 + 2 * channels, dtype=torch.float64)
    count = inputs.numel() // channels
    # Its statistics have the type of these, which are not changed: a momentum of 0.
    kept = torch.zeros(channels, dtype=_wide(inputs.dtype), device=inputs.device)
    found = torch.batch_norm_update_stats(inputs.detach(), kept, kept.clone(), 0.0)
    mean, variance = (each.double().cpu() for each in found)
    return torch.cat([mean.new_full((1,), count), count * mean, count * (variance + mean * mean)])


def _track(running: torch.Tensor | None, found: torch.Tensor, momentum: float) -> None:
    if running is not None:
        wide = running.double()
        running.copy_(wide + momentum * (found.to(wide.device) - wide))


def _transformed(
    inputs: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Normalised by statistics that are known, in torch's own loop."""
    if not inputs.numel():
        return torch.empty_like(inputs)
    return torch.native_batch_norm(inputs, weight, bias, mean, variance, False, 0.0, eps)[0]
