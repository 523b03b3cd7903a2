"""From names in a configuration to the objects that train."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline import data, models
from paceline.config.environment import amx_allowed, cache_root, data_root
from paceline.data.base import DataRequest, Dataset, Source
from paceline.data.sampler import apportion
from paceline.errors import (
    ConfigError,
    DataError,
    ModelError,
    PacelineError,
    UnsupportedError,
    UserError,
)
from paceline.exchange.tensor_parallel.splittable import SAMPLES, SampleTrial
from paceline.local.base import OptimizerFactory, least_part
from paceline.local.cores import usable_cores
from paceline.local.steps import Loss, OwnStep, Step, Supervised
from paceline.local.tiles import describe_tiles
from paceline.models.factory import call_factory, initialise_lazy
from paceline.references import (
    OBJECT,
    is_reference,
    refuse_other_arguments,
    resolve,
    resolve_factory,
)
from paceline.schema import Config, Plan
from paceline.schema.config import LOSSES
from paceline.schema.signature import Signature
from paceline.training.carried import Carried
from paceline.training.given import Given, with_open_data
from paceline.training.optimizers import is_elementwise, optimizer_factory
from paceline.training.pieces_trial import acts_on_pieces
from paceline.training.schedules import Scheduler

__all__ = ["Given", "Parts", "data_request", "make_parts", "model_factory"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything that a training needs, made."""

    dataset: Dataset
    build_model: Callable[[], nn.Module]
    step: Step
    build_optimizer: OptimizerFactory
    elementwise: bool
    """Whether the optimizer treats every number by itself, so that pieces can be updated."""
    own_optimizer: bool = False
    scheduler: Scheduler | None = None
    """How the rate moves, where torch's schedulers say it."""

    @property
    def loss(self) -> Loss:
        """(outputs, targets) -> one number, where the step has a loss of its own."""
        step = self.step
        if not isinstance(step, Supervised):
            raise UnsupportedError(
                "this needs a model of one input and a loss of its outputs, which a step of your"
                " own does not show: use workload.loss"
            )
        return lambda outputs, targets: step.of(outputs, targets).loss

    def trial(self, plan: Plan, model: nn.Module) -> SampleTrial:
        """A few samples and the loss, to see what a model does with its layers."""
        shares, samples = [node.share for node in plan.nodes], len(self.dataset.train)
        whole = min(plan.batch_size, samples)
        batches = [size for size in (whole, samples % whole) if size]
        empty = any(0 in apportion(size, shares, least_part(model)) for size in batches)
        count = min(SAMPLES, len(self.dataset.train))
        inputs, targets = self.dataset.train.fetch(np.arange(count), epoch=0, augment=False)
        return SampleTrial(inputs=inputs, targets=targets, loss=self.loss, without_samples=empty)


def make_parts(config: Config, given: Given | None = None) -> Parts:
    """Open the data and make the factories that the configuration names."""
    given = given or Given()
    work = config.workload
    if config.numerics.precision != "fp32" and amx_allowed():
        describe_tiles()  # every process comes by here before it computes
    custom = own_optimizer(config, given)
    step = make_step(config, given)
    request = data_request(config, given)
    dataset = with_open_data(given, config, request).data
    if dataset is None:
        if work.collate_fn and not is_reference(work.data):
            raise ConfigError(
                f"workload.collate_fn makes batches of data of your own, not of {work.data!r}:"
                " leave it out"
            )
        dataset = data.open_dataset(request)
    first: Source = dataset.train
    build = optimizer_factory(config.optimizer, custom)
    scheduler: Scheduler | None = given.scheduler
    if scheduler is None and config.optimizer.scheduler:
        scheduler = resolve_factory(config.optimizer.scheduler, "optimizer.scheduler")

    def run_once(model: nn.Module) -> None:
        one = first.samples(np.array([0]), epoch=0, augment=False)
        with Carried(model, lambda: model).set_aside():
            if isinstance(step, OwnStep):
                step(model, one.values)
            else:
                model(one.inputs)

    return Parts(
        dataset=dataset,
        build_model=model_factory(config, dataset.signature, given.model, run_once),
        step=step,
        build_optimizer=build,
        elementwise=is_elementwise(config.optimizer) if custom is None else acts_on_pieces(build),
        own_optimizer=custom is not None,
        scheduler=scheduler,
    )


def own_optimizer(config: Config, given: Given | None) -> Callable[..., Any] | None:
    """What makes an optimizer of the user's own; None for one that Paceline names."""
    if given is not None and given.optimizer is not None:
        return given.optimizer
    if ":" not in config.optimizer.name:
        return None
    return resolve_factory(config.optimizer.name, "optimizer.name")


def make_step(config: Config, given: Given) -> Step:
    """What is computed of a batch: the user's step, or the built-in one with a loss and metrics."""
    work = config.workload
    if given.step is not None or work.step:
        step = given.step if given.step is not None else resolve(work.step, "workload.step")
        if isinstance(step, type):
            raise ConfigError(
                f"step {work.step!r} is a class: give a function (model, batch) -> loss"
            )
        refuse_other_arguments(step, f"step {work.step.removeprefix(OBJECT)!r}", "model", "batch")
        return OwnStep(function=step, name=repr(work.step.removeprefix(OBJECT)))
    loss = given.loss if given.loss is not None else _named_loss(work.loss)
    handed = given.metrics or {}
    for name, metric in handed.items():
        if not callable(metric):
            raise ConfigError(
                f"metric {name!r} is a {type(metric).__name__}: give a function (outputs, targets)"
                " -> (sum, count)"
            )
    metrics = {
        name: handed[name] if name in handed else resolve(reference, f"workload.metrics.{name}")
        for name, reference in work.metrics.items()
    }
    for name, metric in metrics.items():
        refuse_other_arguments(metric, f"metric {name!r}", "outputs", "targets")
    return Supervised(
        loss=_checked_loss(loss, work.loss),
        name=work.loss,
        weighs=loss is not nn.functional.cross_entropy,
        metrics=metrics,
    )


def data_request(config: Config, given: Given | None = None) -> DataRequest:
    """What the configuration asks of the data stage."""
    collate = given.collate_fn if given is not None else None
    if collate is None and config.workload.collate_fn:
        collate = resolve(config.workload.collate_fn, "workload.collate_fn")
    if collate is not None:
        refuse_other_arguments(collate, "collate_fn", "samples")
    size = config.data.image_size
    channels = None
    if size is None and config.workload.model in models.names():
        size = models.spec(config.workload.model).input_size
    root = config.data.root or (str(root) if (root := data_root()) else None)
    return DataRequest(
        name=config.workload.data,
        root=root,
        image_size=size,
        channels=channels,
        limit=config.data.limit,
        validation=config.data.validation,
        seed=config.seed,
        cache=config.data.cache or str(cache_root()),
        workers=config.data.workers or usable_cores(),
        processes=config.data.processes,
        nested=bool(config.workload.step),
        collate_fn=collate,
        options=config.data.options,
    )


def _named_loss(name: str) -> Loss:
    if name not in LOSSES:
        return resolve(name, "workload.loss")
    loss: Loss = getattr(nn.functional, name)
    return loss if name == "cross_entropy" else _of_equal_shapes(loss, name)


def _of_equal_shapes(loss: Loss, name: str) -> Loss:
    """Of [32, 1] beside [32] torch would make 32 x 32 differences, with no more than a warning."""

    def checked(outputs: Any, targets: torch.Tensor) -> Any:
        if isinstance(outputs, torch.Tensor) and outputs.shape != targets.shape:
            raise ConfigError(
                f"loss {name!r} compares number by number, but the model gives outputs of shape"
                f" {list(outputs.shape)} for targets of shape {list(targets.shape)}: give both the"
                " same shape, as by .squeeze(1) at the end of forward"
            )
        return loss(outputs, targets)

    return checked


def _checked_loss(loss: Loss, name: str) -> Loss:
    """The loss, of which is said what is wrong where it gives no number that weights can follow."""
    if isinstance(loss, type):
        raise ConfigError(
            f"loss {name!r} is a class: give an instance of it, as loss={loss.__name__}(), or a"
            " function (outputs, targets) -> mean over the samples"
        )
    _refuse_own_weights(loss, name)
    refuse_other_arguments(loss, f"loss {name.removeprefix(OBJECT)!r}", "outputs", "targets")

    def checked(outputs: Any, targets: torch.Tensor) -> Any:
        if loss is nn.functional.cross_entropy:
            _refuse_one_class(outputs, targets)
        try:
            value = loss(outputs, targets)
        except (Exception, SystemExit) as error:
            refusal = _refusal(name, outputs, targets, error)
            if refusal is None:
                raise
            raise refusal from error
        return value

    return checked


def _refuse_own_weights(loss: Loss, name: str) -> None:
    """Weights of a loss reach no optimizer and no checkpoint: they would stay as they are."""
    owner = getattr(loss, "__self__", loss)
    if not isinstance(owner, nn.Module):
        return
    for weight, parameter in owner.named_parameters():
        if parameter.requires_grad:
            raise ConfigError(
                f"loss {name!r} has weights of its own ({weight}), which no optimizer would train:"
                " put it into the model and call it in a step, or freeze it with"
                " requires_grad_(False)"
            )


def _refuse_one_class(outputs: Any, targets: torch.Tensor) -> None:
    """Of one output per sample cross entropy makes 0, or one sum over the batch, without a word."""
    if isinstance(outputs, torch.Tensor) and (outputs.dim() < 2 or outputs.shape[1] == 1):
        raise ConfigError(
            f"loss 'cross_entropy' compares scores of classes, but the model gives outputs of shape"
            f" {list(outputs.shape)} (targets: {list(targets.shape)}): use a loss of your own, such"
            " as nn.MSELoss(), or a model with one output per class"
        )


def _refusal(name: str, outputs: Any, targets: Any, error: BaseException) -> UserError | None:
    """What the user can do about an error of the loss, where that is known."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, SystemExit):
        return ConfigError(f"loss {name!r} ended the program ({reason}): name one that is a loss")
    if isinstance(error, PacelineError):
        return None
    if not isinstance(outputs, torch.Tensor):
        return ModelError(
            f"the model gives a {type(outputs).__name__}, which loss {name!r} cannot take"
            f" ({reason}): return one tensor, or use a loss of your own that takes what it returns"
        )
    if isinstance(error, RuntimeError) and "type" in str(error):
        return DataError(
            f"loss {name!r} cannot take {targets.dtype} targets for {outputs.dtype} outputs"
            f" ({reason}): give numbers of classes as int64 and other targets as float32"
        )
    if isinstance(error, IndexError) and "out of bounds" in str(error) and outputs.dim() > 1:
        return DataError(
            f"loss {name!r} got targets from {int(targets.min())} to {int(targets.max())} for"
            f" outputs of {outputs.shape[1]} classes ({reason}): number classes from 0, or let the"
            " model have more of them"
        )
    if isinstance(error, ValueError) and outputs.shape[:1] != targets.shape[:1]:
        return ModelError(
            f"the model gives outputs of shape {list(outputs.shape)} for targets of shape"
            f" {list(targets.shape)}, which loss {name!r} cannot take ({reason}): give one output"
            " per sample"
        )
    return None


def _refuse_nothing_to_train(model: nn.Module, name: str) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        what = "only frozen weights" if next(model.parameters(), None) is not None else "no weights"
        raise ModelError(
            f"model {name!r} has {what}, so that nothing can be trained: let requires_grad be True"
            " for those that are to be"
        )


def _refuse_hidden_train(model: nn.Module) -> None:
    """A method `train` of one's own hides the one that puts layers into training mode."""
    for layer in model.modules():
        try:
            inspect.signature(layer.train).bind(True)
        except TypeError:
            raise ModelError(
                f"{type(layer).__name__} has a method train of its own, which cannot be called as"
                " torch's train(mode) and hides it: rename it"
            ) from None


def model_factory(
    config: Config,
    takes: Signature,
    given: Callable[..., nn.Module] | None,
    run_once: Callable[[nn.Module], object],
) -> Callable[[], nn.Module]:
    """What makes the model of a configuration, for inputs as `takes` says.

    `run_once` runs it on one sample, for layers that wait for one.
    """
    work = config.workload
    shape = takes.shape
    classes = work.classes or len(takes.classes)
    if given is None and work.model in models.names() and (len(shape) != 3 or not classes):
        raise ModelError(
            f"{work.model} takes images with classes, but the samples of {takes.data} have the"
            f" shape {shape}: use a model of your own"
            if len(shape) != 3
            else f"{work.model} must know how many classes {takes.data} has, which it does not"
            " tell: set workload.classes"
        )
    if work.classes is not None and work.classes < len(takes.classes):
        raise ConfigError(
            f"workload.classes = {work.classes} is fewer than the {len(takes.classes)} classes of"
            f" {takes.data}: leave it out or raise it"
        )
    factory, name = given, work.model
    if factory is None and is_reference(work.model):
        factory = resolve_factory(work.model, "model")
    sizes = {} if work.step and not shape else {"channels": shape[0] if shape else 1}
    if len(shape) == 3:
        sizes["image_size"] = shape[-1]
    if classes:
        sizes["classes"] = classes

    def build() -> nn.Module:
        # The seed belongs to the model alone: what was drawn before does not change the weights.
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            if factory is None:
                model = models.build(work.model, options=work.model_options, **sizes)
            else:
                model = call_factory(factory, name, sizes, work.model_options)
                initialise_lazy(model, name, run_once)
                _refuse_hidden_train(model)
                _refuse_nothing_to_train(model, name)
        if work.weights is not None:
            models.load_weights(model, Path(work.weights), replace_head=work.head == "replace")
        if work.freeze:
            models.freeze_body(model)
        return model

    return build
