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
from torch.utils._pytree import tree_map_only

from paceline.errors import DataError, ModelError, PacelineError, StrategyError, UnsupportedError
from paceline.local.batch_norm import batch_norms, use_plain_synchronised
from paceline.local.gradient_hooks import refuse_shared_memory
from paceline.local.single_pixel import use_single_pixels
from paceline.local.still import settle, still
from paceline.local.tiles import check_bf16
from paceline.models.extra_state import has_extra_state
from paceline.schema import NodePlan, RankContext
from paceline.schema.events import SpanName

if TYPE_CHECKING:
    from paceline.exchange.base import Exchange
    from paceline.exchange.partition import Partition
    from paceline.local.batch_norm import WholeBatch
    from paceline.local.board import Arena, Board
    from paceline.local.part_sums import NodeSums

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
# name of a parameter -> name of a state entry -> its value (tensors as large as the parameter,
# or numbers): the same whatever strategy made it, so that any other can go on from it
OptimizerState = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a strategy needs to build itself on one rank."""

    build_model: Callable[[], nn.Module]
    """A fresh model; the same weights on every rank and every call."""
    loss: Loss
    """(outputs, targets) -> the mean over the samples."""
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

    loss_sum: float
    """Sum of the losses of the samples whose loss this rank computed."""
    correct: float
    """Samples that were classified correctly; NaN where there are no classes."""
    samples: int
    """Samples whose loss this rank computed; 0 on ranks that compute none."""


class LocalStrategy(ABC):
    """One rank's part of one node's way to train.

    The gradient of an update is exactly that of the mean loss over the global
    batch, however the batch is divided: each part's mean is weighted with its
    samples over all samples.
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

    @property
    def workers(self) -> int:
        """Into how many parts the node's share is divided among ranks."""
        return 1

    @functools.cached_property
    def least(self) -> int:
        """Fewest samples that a part of a batch may have, if it has any (see `least_part`)."""
        whole = self.synchronous and not self.job.local_batch_norm
        return 1 if whole else least_part(self.model)

    @property
    def reads_inputs(self) -> bool:
        """False on ranks that get their inputs from another rank."""
        return True

    @abstractmethod
    def update(
        self, inputs: torch.Tensor, targets: torch.Tensor, total: int, step: int
    ) -> StepResult:
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


def full_precision(outputs: Any) -> Any:
    """Outputs as the loss takes them: a loss summed in bf16 would lose most of its digits."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    return tree_map_only(torch.Tensor, full_precision, outputs)


def layout(job: Job, tensor: torch.Tensor) -> torch.Tensor:
    """Inputs on the device, in the memory format of the plan."""
    if job.memory_format == "channels_last" and tensor.dim() == 4:
        return tensor.to(job.device, memory_format=torch.channels_last)
    return tensor.to(job.device)


def scored(model: nn.Module, inputs: torch.Tensor) -> Any:
    """The model's outputs for an evaluation, in which no gradients are kept.

    A model that takes derivatives itself (`autograd.grad` in its forward) gets them there too.
    """
    try:
        return model(inputs)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        outputs = model(inputs)
    return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)


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
    if job.node.strategy in ("sequential", "threads") and job.nodes == 1:
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


def mean_loss_part(loss: torch.Tensor, count: int, total: int) -> torch.Tensor:
    """This part's contribution to the mean over the global batch."""
    return loss if count == total else loss * (count / total)


def gradients(
    job: Job,
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    total: int,
    step: int,
    worker: int | None,
    whole: WholeBatch | None = None,
) -> StepResult:
    """Add the gradient of one part of a global batch to the parameters' `.grad`.

    `worker` picks the random numbers of this update; None leaves the generator alone. `whole`:
    how BatchNorm comes to the statistics of all parts.
    """
    count = len(targets)
    if count == 0:  # fewer samples than workers: this one has nothing to add
        if whole is not None:
            whole.join(model)
        return StepResult(loss_sum=0.0, correct=0, samples=0)
    if worker is not None:
        seed_step(job.seed, step, job.first_worker + worker)
    inputs, targets = layout(job, inputs), targets.to(job.device)
    with contextlib.nullcontext() if whole is None else whole.update(model):
        with users_code(model, inputs, targets):
            with autocast(job):
                outputs = full_precision(model(inputs))
            loss = job.loss(outputs, targets)
        # A model may run its forward pass again under the backward one (checkpointing).
        with still() if job.still else contextlib.nullcontext():
            mean_loss_part(loss, count, total).backward()  # type: ignore[no-untyped-call]
    return StepResult(
        loss_sum=float(loss.detach()) * count,
        correct=count_correct(outputs, targets),
        samples=count,
    )


@contextlib.contextmanager
def users_code(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Iterator[None]:
    """Say of an error that it came out of the model or the loss, and on what."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PacelineError):
            raise
        if len(targets) == 1 and is_about_one_sample(error):
            raise DataError(one_sample(error)) from error
        weights = next((p.dtype for p in model.parameters()), inputs.dtype)
        if isinstance(error, RuntimeError) and "type" in str(error) and inputs.dtype != weights:
            reason = " ".join(str(error).split())
            raise DataError(
                f"the model's weights are {weights} and its inputs {inputs.dtype}, which do not go"
                f" together ({reason}): let the dataset give {weights}, as x.float() does (bytes"
                " also divided by 255, as a rule), or convert them in the model"
            ) from error
        error.add_note(
            f"raised by the model or the loss, on inputs of shape {list(inputs.shape)} and"
            f" targets of shape {list(targets.shape)}"
        )
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
