"""From names in a configuration to the objects that train."""

from __future__ import annotations

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
from paceline.errors import ConfigError, DataError, ModelError, PacelineError, UserError
from paceline.exchange.splittable import SAMPLES, Trial
from paceline.local.base import Loss, OptimizerFactory, least_part
from paceline.local.cores import usable_cores
from paceline.local.tiles import describe_tiles
from paceline.models.factory import call_factory, initialise_lazy
from paceline.references import is_reference, resolve, resolve_factory
from paceline.schema import Config, Plan
from paceline.schema.signature import Signature
from paceline.train.given import Given, with_open_data
from paceline.train.optimizers import is_elementwise, optimizer_factory

__all__ = ["Given", "Parts", "data_request", "make_parts", "model_factory"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything that a training needs, made."""

    dataset: Dataset
    build_model: Callable[[], nn.Module]
    loss: Loss
    build_optimizer: OptimizerFactory
    elementwise: bool

    def trial(self, plan: Plan, model: nn.Module) -> Trial:
        """A few samples and the loss, to see what a model does with its layers."""
        shares, samples = [node.share for node in plan.nodes], len(self.dataset.train)
        whole = min(plan.batch_size, samples)
        batches = [size for size in (whole, samples % whole) if size]
        empty = any(0 in apportion(size, shares, least_part(model)) for size in batches)
        count = min(SAMPLES, len(self.dataset.train))
        inputs, targets = self.dataset.train.fetch(np.arange(count), epoch=0, augment=False)
        return Trial(inputs=inputs, targets=targets, loss=self.loss, without_samples=empty)


def make_parts(config: Config, given: Given | None = None) -> Parts:
    """Open the data and make the factories that the configuration names."""
    given = given or Given()
    if config.numerics.precision != "fp32" and amx_allowed():
        describe_tiles()  # every process comes by here before it computes
    custom = given.optimizer
    if custom is None and ":" in config.optimizer.name:
        custom = resolve_factory(config.optimizer.name, "optimizer.name")
    loss = given.loss
    if loss is None:
        loss = _named_loss(config.workload.loss)
    dataset = with_open_data(given, config, data_request(config)).data
    if dataset is None:
        dataset = data.open_dataset(data_request(config))
    first: Source = dataset.train

    def one_input() -> torch.Tensor:
        return first.fetch(np.array([0]), epoch=0, augment=False)[0]

    return Parts(
        dataset=dataset,
        build_model=model_factory(config, dataset.signature, given.model, one_input),
        loss=_checked_loss(loss, config.workload.loss),
        build_optimizer=optimizer_factory(config.optimizer, custom),
        elementwise=is_elementwise(config.optimizer, custom),
    )


def data_request(config: Config) -> DataRequest:
    """What the configuration asks of the data stage."""
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
        options=config.data.options,
    )


def _named_loss(name: str) -> Loss:
    if name == "cross_entropy":
        return nn.functional.cross_entropy
    return resolve(name, "workload.loss")


def _checked_loss(loss: Loss, name: str) -> Loss:
    """The loss, of which is said what is wrong where it gives no number that weights can follow."""
    if isinstance(loss, type):
        raise ConfigError(
            f"loss {name!r} is a class: give an instance of it, as loss={loss.__name__}(), or a"
            " function (outputs, targets) -> mean over the samples"
        )

    def checked(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if loss is nn.functional.cross_entropy:
            _refuse_one_class(outputs, targets)
        try:
            value: Any = loss(outputs, targets)
        except (Exception, SystemExit) as error:
            refusal = _refusal(name, outputs, targets, error)
            if refusal is None:
                raise
            raise refusal from error
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
            if value.requires_grad or not torch.is_grad_enabled():
                return value
            shown = "a number that no weight has a part in"
        elif isinstance(value, torch.Tensor):
            shown = f"a {value.dtype} tensor of shape {list(value.shape)}"
        else:
            shown = f"a {type(value).__name__}"
        raise ConfigError(
            f"loss {name!r} gave {shown}: it must give the mean over the samples, one number that"
            " comes of the model's outputs"
        )

    return checked


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
    return None


def model_factory(
    config: Config,
    takes: Signature,
    given: Callable[..., nn.Module] | None,
    one_input: Callable[[], torch.Tensor],
) -> Callable[[], nn.Module]:
    """What makes the model of a configuration, for inputs as `takes` says."""
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
    sizes = {"channels": shape[0] if shape else 1}
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
                initialise_lazy(model, name, one_input)
        if work.weights is not None:
            models.load_weights(model, Path(work.weights), replace_head=work.head == "replace")
        if work.freeze:
            models.freeze_body(model)
        return model

    return build
