"""From names in a configuration to the objects that train."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch import nn

from paceline import data, models
from paceline.config.environment import cache_root, data_root
from paceline.data.base import DataRequest, Dataset
from paceline.errors import ConfigError, DataError, ModelError
from paceline.exchange.splittable import SAMPLES, Trial
from paceline.local.base import Loss, OptimizerFactory
from paceline.local.cores import usable_cores
from paceline.local.tiles import describe_tiles
from paceline.models.factory import call_factory
from paceline.references import resolve
from paceline.schema import Config
from paceline.train.optimizers import is_elementwise, optimizer_factory


@dataclass(frozen=True, kw_only=True)
class Given:
    """Objects that the caller of the Python API hands over instead of names."""

    model: Callable[..., nn.Module] | None = None
    data: Dataset | None = None
    loss: Loss | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything that a training needs, made."""

    dataset: Dataset
    build_model: Callable[[], nn.Module]
    loss: Loss
    build_optimizer: OptimizerFactory
    elementwise: bool

    def trial(self) -> Trial:
        """A few samples and the loss, to see what a model does with its layers."""
        count = min(SAMPLES, len(self.dataset.train))
        inputs, targets = self.dataset.train.fetch(np.arange(count), epoch=0, augment=False)
        return Trial(inputs=inputs, targets=targets, loss=self.loss)


def make_parts(config: Config, given: Given | None = None) -> Parts:
    """Open the data and make the factories that the configuration names."""
    given = given or Given()
    if config.numerics.precision != "fp32":
        describe_tiles()  # every process comes by here before it computes
    custom = given.optimizer
    if custom is None and ":" in config.optimizer.name:
        custom = resolve(config.optimizer.name, "optimizer.name")
    loss = given.loss
    if loss is None:
        loss = _named_loss(config.workload.loss)
    dataset = given.data or data.open_dataset(data_request(config))
    return Parts(
        dataset=dataset,
        build_model=_model_factory(config, dataset, given.model),
        loss=loss,
        build_optimizer=optimizer_factory(config.optimizer, custom),
        elementwise=is_elementwise(config.optimizer, custom),
    )


def with_dataset(given: Given, value: Any, config: Config) -> Given:
    """`given` with the user's own dataset objects, where `value` is not just a name."""
    if isinstance(value, str) or callable(value):
        return given
    if isinstance(value, Dataset):
        return dataclasses.replace(given, data=value)
    if not (isinstance(value, tuple) and len(value) == 2):
        length = len(value) if hasattr(value, "__len__") else 0
        if length < 2:
            raise DataError(
                f"data = {type(value).__name__} must be a name, a map-style dataset of at least two"
                " samples, or a pair (train, test) of them"
            )
        kept = max(1, round(config.data.validation * length))
        generator = torch.Generator().manual_seed(config.seed)
        value = torch.utils.data.random_split(value, [length - kept, kept], generator)
    opened = data.from_datasets(value[0], value[1], seed=config.seed)
    return dataclasses.replace(given, data=opened)


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


def _model_factory(
    config: Config, dataset: Dataset, given: Callable[..., nn.Module] | None
) -> Callable[[], nn.Module]:
    work = config.workload
    shape = dataset.sample_shape
    if given is None and work.model in models.names() and (len(shape) != 3 or not dataset.classes):
        raise ModelError(
            f"{work.model} takes images with classes, but the samples of {dataset.name} have the"
            f" shape {shape}: use a model of your own"
        )

    def build() -> nn.Module:
        # The seed belongs to the model alone: what was drawn before does not change the weights.
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            model = _build_once()
        if work.weights is not None:
            models.load_weights(model, Path(work.weights), replace_head=work.head == "replace")
        if work.freeze:
            models.freeze_body(model)
        return model

    def _build_once() -> nn.Module:
        sizes = {"channels": shape[0] if shape else 1}
        if len(shape) == 3:
            sizes["image_size"] = shape[-1]
        if work.classes or dataset.classes:
            sizes["classes"] = work.classes or len(dataset.classes)
        if given is not None:
            name = getattr(given, "__qualname__", type(given).__qualname__)
            return call_factory(given, name, sizes, work.model_options)
        return models.build(work.model, options=work.model_options, **sizes)

    if work.classes is not None and work.classes < len(dataset.classes):
        raise ConfigError(
            f"workload.classes = {work.classes} is fewer than the {len(dataset.classes)} classes of"
            f" {dataset.name}: leave it out or raise it"
        )
    return build
