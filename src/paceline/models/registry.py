"""What models there are: a table that costs nothing to read (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from paceline.errors import ModelError, unknown_name

_DROPOUT = "share of activations dropped before the dense layers while training, 0 to below 1"
_POOL = "side of the picture that the dense layers see: {0} by default, {1} for 32x32"
_STEM = "'imagenet' (7x7 stride 2, then max-pool) or 'small' (3x3 stride 1, no max-pool: for 28x28)"
_ALEXNET_STEM = "'imagenet' (11x11, stride 4) or 'small' (3x3, stride 1: for images of 15 and more)"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model that Paceline brings."""

    name: str
    summary: str
    """One line for the table of models, short enough for a terminal of 80 columns."""
    factory: str
    """`module:callable` below `paceline.models`, imported when the model is built."""
    input_size: int
    """Height and width the model was made for."""
    minimum_size: int
    """Smallest height and width that leave at least one pixel after the last pooling."""
    channels: int
    classes: int
    published_parameters: int
    """Number of parameters at the default channels, classes, size and options."""
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Option name -> one line about it."""
    small_minimum: int | None = None
    """Smallest height and width with the option stem = "small"; as without it when left out."""
    sized: bool = False
    """Whether the dense layers are built for one image size."""

    @property
    def megabytes(self) -> float:
        """Size of the parameters in fp32, in units of 10^6 bytes."""
        return self.published_parameters * 4 / 1e6


def _imagenet(
    name: str, summary: str, factory: str, parameters: int, minimum: int, options: dict[str, str]
) -> ModelSpec:
    return ModelSpec(
        name=name,
        summary=summary,
        factory=factory,
        input_size=224,
        minimum_size=minimum,
        channels=3,
        classes=1000,
        published_parameters=parameters,
        options=MappingProxyType(options),
    )


_SPECS: dict[str, ModelSpec] = {
    each.name: each
    for each in (
        ModelSpec(
            name="mnist_cnn",
            summary="3 convolutions and 3 dense",
            factory="cnn:mnist_cnn",
            input_size=28,
            minimum_size=22,
            channels=1,
            classes=10,
            published_parameters=690_590,
            options=MappingProxyType({"dropout": _DROPOUT}),
            sized=True,
        ),
        ModelSpec(
            name="shallow_cnn",
            summary="2 convolutions and 2 dense",
            factory="cnn:shallow_cnn",
            input_size=28,
            minimum_size=16,
            channels=1,
            classes=10,
            published_parameters=431_080,
            sized=True,
        ),
        replace(
            _imagenet(
                "alexnet",
                "5 convolutions and 3 dense",
                "alexnet:alexnet",
                61_100_840,
                63,
                {"dropout": _DROPOUT, "stem": _ALEXNET_STEM, "pool": _POOL.format(6, 3)},
            ),
            small_minimum=15,
        ),
        _imagenet(
            "vgg16",
            "13 convolutions and 3 dense",
            "vgg:vgg16",
            138_357_544,
            32,
            {"dropout": _DROPOUT, "pool": _POOL.format(7, 1)},
        ),
        _imagenet(
            "vgg19",
            "16 convolutions and 3 dense",
            "vgg:vgg19",
            143_667_240,
            32,
            {"dropout": _DROPOUT, "pool": _POOL.format(7, 1)},
        ),
        _imagenet(
            "resnet18",
            "18 layers in basic blocks",
            "resnet:resnet18",
            11_689_512,
            1,
            {"stem": _STEM},
        ),
        _imagenet(
            "resnet34",
            "34 layers in basic blocks",
            "resnet:resnet34",
            21_797_672,
            1,
            {"stem": _STEM},
        ),
        _imagenet(
            "resnet50",
            "50 layers in bottlenecks",
            "resnet:resnet50",
            25_557_032,
            1,
            {"stem": _STEM},
        ),
        _imagenet(
            "resnet152",
            "152 layers in bottlenecks",
            "resnet:resnet152",
            60_192_808,
            1,
            {"stem": _STEM},
        ),
    )
}


def names() -> list[str]:
    """The names of the models that Paceline brings, small ones first."""
    return list(_SPECS)


def spec(name: str) -> ModelSpec:
    """What is known about a model without building it.

    >>> spec("alexnet").published_parameters
    61100840
    """
    if name not in _SPECS:
        raise ModelError(
            f"{unknown_name('model', name, _SPECS)}; for one of your own write"
            " 'package.module:callable' or 'path/to/file.py:callable'"
        )
    return _SPECS[name]
