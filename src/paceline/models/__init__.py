"""The models Paceline brings, and the user's own.

Importing this package is cheap: torch is imported when a model is built.

    from paceline import models

    network = models.build("resnet18", classes=10, channels=1, options={"stem": "small"})
    models.load_weights(network, "resnet18.safetensors", replace_head=True)
    models.freeze_body(network)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.models.registry import ModelSpec, names, spec
from paceline.models.summary import LayerSummary, ModelSummary

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "ModelSpec",
    "names",
    "spec",
    "build",
    "load_weights",
    "freeze_body",
    "head_name",
    "LayerSummary",
    "ModelSummary",
    "summarise",
]


def build(
    name_or_reference: str,
    *,
    classes: int | None = None,
    channels: int,
    options: Mapping[str, object] | None = None,
    image_size: int | None = None,
) -> nn.Module:
    """A freshly initialised model, by name or by `module:callable` reference.

    A callable of the user's own is called with the keyword arguments `classes`,
    `channels` and `image_size` as far as its signature accepts them, and with all
    `options`; an option that it does not accept is an error. Built-in models need `classes`.

    >>> build("mnist_cnn", classes=10, channels=1).classifier[-1].out_features
    10
    """
    from paceline.models import factory

    return factory.build(
        name_or_reference,
        classes=classes,
        channels=channels,
        options=dict(options or {}),
        image_size=image_size,
    )


def load_weights(module: nn.Module, path: str | Path, *, replace_head: bool) -> list[str]:
    """Copy the weights in a safetensors or torch file into `module`.

    With `replace_head`, a head (last dense layer) made for another number of
    classes is left out, so that its layer keeps its fresh weights. Returns the
    names of the tensors that were not loaded. A file that does not fit raises
    `ModelError` and changes nothing.
    """
    from paceline.models import weights

    return weights.load_weights(module, Path(path), replace_head=replace_head)


def freeze_body(module: nn.Module) -> None:
    """Train only the head: every other parameter gets `requires_grad = False`.

    BatchNorm layers of the body also keep their running statistics: each gets
    `frozen = True`, goes to evaluation mode, and stays there when `train()` is
    called on it or on a module around it.
    """
    from paceline.models import weights

    weights.freeze_body(module)


def head_name(module: nn.Module) -> str:
    """The name of the last dense layer, such as `fc` or `classifier.6`."""
    from paceline.models import weights

    return weights.head_name(module)


def summarise(module: nn.Module, sample_shape: Sequence[int]) -> ModelSummary:
    """Layers, output shapes, parameters and multiply-adds for one sample.

    `sample_shape` is without the batch, such as `(3, 224, 224)`. GFLOPs count
    one multiply-add as one, as published tables do (AlexNet 0.7, VGG16 15.5).
    The module's training mode and the random state are as before afterwards.
    """
    from paceline.models import inspection

    return inspection.summarise(module, tuple(sample_shape))
