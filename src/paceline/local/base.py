"""What every local strategy is: one way for a node to turn samples into an update."""

from __future__ import annotations

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.data.samples import Samples
from paceline.errors import ModelError, StrategyError, UnsupportedError
from paceline.local.batch_norm import batch_norms, use_plain_synchronised
from paceline.local.gradient_hooks import refuse_shared_memory
from paceline.local.single_pixel import use_single_pixels
from paceline.local.steps import (
    NO_WEIGHTS,
    Measure,
    Step,
    Sums,
    added,
    has_gradient,
    users_code,
    with_samples,
)
from paceline.local.still import settle, still
from paceline.local.tiles import check_bf16
from paceline.local.values import mapped
from paceline.models.extra_state import has_extra_state
from paceline.schema import NodePlan, RankContext
from paceline.schema.events import SpanName
from paceline.schema.strategies import strategy_of

if TYPE_CHECKING:
    from paceline.exchange.base import Exchange
    from paceline.exchange.tensor_parallel.layers import Partition
    from paceline.local.batch_norm import WholeBatch
    from paceline.local.board import Arena, Board
    from paceline.local.part_sums import NodeSums

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
# name of a parameter -> name of a state entry -> its value (tensors as large as the parameter,
# or numbers): the same whatever strategy made it, so that any other can go on from it
OptimizerState = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a strategy needs to build itself on one rank."""

    build_model: Callable[[], nn.Module]
    """A fresh model; the same weights on every rank and every call."""
    step: Step
    """What is computed of some samples: a loss, its weight, and what is reported."""
    build_optimizer: OptimizerFactory
    elementwise: bool
    """The optimizer treats every weight by itself, so that tensors can be cut into pieces."""
    node: NodePlan
    context: RankContext = field(default_factory=RankContext)
    precision: str = "fp32"
    memory_format: str = "contiguous"
    compile: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clip_norm: float | None = None
    seed: int = 0
    sample_shape: tuple[int, ...] = ()
    sample_type: torch.dtype | None = None
    """Of one input as the data gives it; None where nobody has looked."""
    batch_size: int = 1
    """Samples per batch of this node, the last and smaller one of an epoch aside."""
    last_batch: int = 0
    """Samples of that last one, where it is smaller; 0 if there is none."""
    board: Board | None = None
    """Shared by the ranks of a node; None when there is only one."""
    arena: Arena | None = None
    """Where ranks of a node share weights and gradients; None when there is only one."""
    span: Callable[[SpanName], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Times a part of the update for whoever observes the run: "optimizer"."""
    exchange: Exchange | None = None
    """How this node agrees with others, on its leader; None when there is only one node."""
    partition: Partition | None = None
    """Layers whose weights are split over nodes; None when every node has all of them."""
    nodes: int = 1
    first_worker: int = 0
    """The number of this node's first worker among the workers of all nodes."""
    node_sums: NodeSums | None = None
    """How this node adds up statistics with others, on its leader, where the exchange is exact."""
    local_batch_norm: bool = False
    """BatchNorm may normalise every part of a batch by itself."""
    still: bool = False
    """Without chance: to be held against another training."""
    settled: bool = False
    """BatchNorm uses the statistics that it has, not those of a batch (see `settle`)."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one update did on this rank."""

    loss_sum: float = 0.0
    """What the loss of the samples that this rank computed is the mean of,"""
    weight: float = 0.0
    """and by what: as a rule their number."""
    correct: float = 0.0
    """Samples that were classified correctly; NaN where there are no classes."""
    samples: int = 0
    """Samples whose loss this rank computed; 0 on ranks that compute none."""
    counted: float = 0.0
    """What this rank's gradient counts for (see `steps`); all together, the samples as a rule."""
    sums: Sums = field(default_factory=dict)
    """What else the step reports."""

    @classmethod
    def of(cls, found: Measure, count: int, counted: float) -> StepResult:
        """Of the samples of one part."""
        loss_sum, weight = found.loss_and_weight(count)
        return cls(
            loss_sum=loss_sum,
            weight=weight,
            correct=found.correct,
            samples=count,
            counted=counted,
            sums=with_samples(found.sums, count),
        )

    def __add__(self, other: StepResult) -> StepResult:
        return StepResult(
            loss_sum=self.loss_sum + other.loss_sum,
            weight=self.weight + other.weight,
            correct=self.correct + other.correct,
            samples=self.samples + other.samples,
            counted=self.counted + other.counted,
            sums=added(self.sums, other.sums),
        )


class LocalStrategy(ABC):
    """One rank's part of one node's way to train.

    The gradient of an update is exactly that of the mean loss over the global
    batch, however the batch is divided (see `steps`).
    """

    name: ClassVar[str]
    synchronous: ClassVar[bool] = True
    summary: ClassVar[str] = ""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = job.device

    @property
    def worker(self) -> int:
        """Which part of the node's share this rank feeds on."""
        return 0

    @functools.cached_property
    def least(self) -> int:
        """Fewest samples that a part of a batch may have, if it has any (see `least_part`)."""
        whole = self.synchronous and not self.job.local_batch_norm
        return 1 if whole else least_part(self.model)

    def parts(self, count: int) -> list[int]:
        """Into which parts this rank divides so many samples again."""
        return [count]

    @property
    def reads_inputs(self) -> bool:
        """False on ranks that get their inputs from another rank."""
        return True

    @abstractmethod
    def update(self, samples: Samples, total: int, step: int) -> StepResult:
        """One update from this rank's samples out of a global batch of `total`."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The whole model with the current weights, to evaluate and to save."""

    @abstractmethod
    def scale_rate(self, factor: float) -> None:
        """The learning rate from now on, relative to the one the optimizer was made with."""

    @abstractmethod
    def optimizer_state(self) -> OptimizerState:
        """The whole optimizer state, whole tensors; every rank of the node calls it."""

    @abstractmethod
    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Go on from a state that any strategy saved."""

    def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Go on from saved weights and buffers; every rank of the node calls it."""
        self.model.load_state_dict(tensors)

    def prepare_evaluation(self) -> None:  # noqa: B027 - one copy of the model needs none
        """Make `model` whole and the same on every rank; every rank of the node calls it."""

    def spread_buffers(self) -> None:  # noqa: B027 - one copy of the model needs none
        """Give the node's other ranks the leader's buffers; every rank of the node calls it."""

    @property
    def copies(self) -> list[nn.Module]:
        """Every module of this process that trains as the model."""
        return [self.model]

    @property
    def parameters(self) -> int:
        """How many weights the whole model has."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def close(self) -> None:  # noqa: B027 - most strategies hold nothing
        """Give back what is held outside this process."""


def autocast(job: Job) -> contextlib.AbstractContextManager[Any]:
    """The context in which the forward pass runs."""
    cast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if job.precision == "bf16":
        if job.device.type == "cpu":
            check_bf16()
        cast = torch.autocast(job.device.type, dtype=torch.bfloat16)
    return _stilled(cast) if job.still else cast


@contextlib.contextmanager
def _stilled(cast: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with cast, still():
        yield


def layout(job: Job, tensor: torch.Tensor) -> torch.Tensor:
    """Inputs on the device, in the memory format of the plan."""
    if job.memory_format == "channels_last" and tensor.dim() == 4:
        return tensor.to(job.device, memory_format=torch.channels_last)
    return tensor.to(job.device)


def placed(job: Job, values: Any) -> Any:
    """A batch of any structure on the device, in the memory format of the plan."""
    if job.device.type == "cpu" and job.memory_format == "contiguous":
        return values
    return mapped(values, lambda tensor: layout(job, tensor))


def prepare_model(job: Job) -> nn.Module:
    """The model on its device, in its memory format, in training mode."""
    model = job.build_model()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"the shape of {name} is not known before the model has run (a lazy layer): run it"
                " once on a sample where it is made, or give the layer its sizes"
            )
    model = model.to(job.device)
    _refuse_copies(model, job)
    use_single_pixels(model)
    if job.device.type == "cpu":
        use_plain_synchronised(model)
    if job.memory_format == "channels_last":
        refuse_shared_memory(model, "numerics.memory_format = 'channels_last'")
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    if job.settled:
        settle(model)
    return model


def _refuse_copies(model: nn.Module, job: Job) -> None:
    """Some models cannot be copied so that the copies are one model to train."""
    if strategy_of(job.node).is_plain and job.nodes == 1:
        return
    if has_extra_state(model):
        reason = "has a state of its own (get_extra_state), which copies of it do not share"
    elif any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        reason = "is TorchScript, whose copies keep their gradients to themselves"
    else:
        return
    raise StrategyError(
        f"the model ({type(model).__name__}) {reason}: train it on one machine with"
        " local.strategy = 'threads'"
    )


def least_part(model: nn.Module) -> int:
    """Fewest samples that a part may have by itself: BatchNorm cannot normalise a single one.

    >>> least_part(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))), least_part(nn.Linear(2, 2))
    (2, 1)
    """
    return 2 if batch_norms(model) else 1


def seed_step(seed: int, step: int, worker: int) -> None:
    """Random numbers (dropout) that depend only on where we are, so a resumed run repeats them."""
    torch.default_generator.manual_seed(step_seed(seed, step, worker))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(step_seed(seed, step, worker))


def step_seed(seed: int, step: int, worker: int) -> int:
    """A different number for every update of every worker (SplitMix64 of the three)."""
    value = (
        seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + worker * 0x94D049BB133111EB
    ) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return (value ^ (value >> 31)) % 2**63


def gradients(
    job: Job,
    model: nn.Module,
    samples: Samples,
    total: int,
    step: int,
    worker: int | None,
    whole: WholeBatch | None = None,
) -> StepResult:
    """Add the gradient of one part of a global batch to the parameters' `.grad`.

    `worker` picks the random numbers of this update; None leaves the generator alone. `whole`:
    how BatchNorm comes to the statistics of all parts.
    """
    if samples.count == 0:  # fewer samples than workers: this one has nothing to add
        if whole is not None:
            whole.join(model)
        return StepResult()
    if worker is not None:
        seed_step(job.seed, step, job.first_worker + worker)
    values = placed(job, samples.values)
    with contextlib.nullcontext() if whole is None else whole.update(model):
        with users_code(job.step, model, values, samples.count), autocast(job):
            found = job.step(model, values)
        factor, counted = found.part_of(samples.count, total)
        if factor or _counts_nothing_well(found.loss, model, whole):
            loss = found.loss if factor == 1.0 else found.loss * factor
            # A model may run its forward pass again under the backward one (checkpointing).
            with still() if job.still else contextlib.nullcontext():
                loss.backward()  # type: ignore[no-untyped-call]
    return StepResult.of(found, samples.count, counted)


def _counts_nothing_well(loss: torch.Tensor, model: nn.Module, whole: WholeBatch | None) -> bool:
    """Whether a part of the weight 0 adds zeros to the gradient, or nothing at all."""
    if whole is None:
        return has_gradient(loss, model)
    if not math.isfinite(float(loss.detach())):
        raise StrategyError(
            "a part of a batch has the weight 0 and a loss that is not a number, while BatchNorm"
            " needs its gradient: divide by the weight only where it is above 0, as"
            " weight.clamp(min=1)"
        )
    return True


def agree_on_gradients(
    job: Job, carried: nn.Parameter | None, result: StepResult, counted: float, total: int
) -> tuple[bool, float]:
    """Have the exchange add up a node's gradients over all nodes.

    Gives whether they are to be applied, and what all of them count for. `counted`: what this
    node's count for, which travels with them as the gradient of `carried`.
    """
    exchange = job.exchange
    assert exchange is not None
    if carried is not None:
        carried.grad = torch.full_like(carried, counted)
    elif not exchange.own_loss and result.counted != result.samples:
        raise UnsupportedError(NO_WEIGHTS)
    applied = exchange.finish()
    if carried is not None and carried.grad is not None:
        return applied, float(carried.grad)
    return applied, counted if exchange.own_loss else float(total)


def scale_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to `factor` times the one it was made with."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def clip_gradients(parameters: Iterable[torch.Tensor], limit: float | None) -> None:
    """Shorten the whole gradient to `limit` where it is longer."""
    if limit is not None:
        listed = list(parameters)
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in listed):
            raise UnsupportedError(
                "optimizer.clip_norm needs dense gradients, but one is sparse: leave it out, or"
                " make the layer with sparse=False"
            )
        torch.nn.utils.clip_grad_norm_(listed, limit)
