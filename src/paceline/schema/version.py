"""A version of a model that can be served: what lies in `models/NAME/VERSION/`. No torch.

    version.json         everything below: signature, origin, SHA-256 of the other files
    model.onnx           or model.pt2, or model.safetensors

and beside the versions `serving.json`, which a person may change: which of them are served.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from paceline.errors import ConfigError, shown
from paceline.schema.codec import rule
from paceline.schema.signature import Signature

FORMAT = 1
Kind = Literal["onnx", "torch", "safetensors"]
FILES: dict[str, str] = {
    "onnx": "model.onnx",
    "torch": "model.pt2",
    "safetensors": "model.safetensors",
}
"""What the model itself is called, by kind."""
DATATYPES: dict[str, str] = {
    "float32": "FP32", "float64": "FP64", "float16": "FP16", "int64": "INT64", "int32": "INT32",
    "int16": "INT16", "int8": "INT8", "uint8": "UINT8", "bool": "BOOL",
}  # fmt: skip
"""Types that can be asked with, and what the Open Inference Protocol calls them."""
MOST_NUMBERS = 2**28
"""Of a sample: in float32 a gigabyte, more than any request may have."""
INPUT, OUTPUT = "input", "output"
"""What requests and exports call the two tensors."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a version came from."""

    run: str
    update: int
    epoch: int
    commit: str | None = None
    """The git commit of the folder that it was exported in, where that is one."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The run's line of metrics of that epoch: test_accuracy and so on."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """How far the export's outputs were from the model's, on real samples."""

    samples: int
    largest: float
    """Of the differences, relative to the largest output."""
    tolerance: float


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What a model of Paceline's own is built from, to put weights of a .safetensors into."""

    name: str
    options: dict[str, object] = field(default_factory=dict)
    classes: int = 0


@dataclass(frozen=True, kw_only=True)
class Version:
    """What version.json says."""

    format: int = FORMAT
    kind: Kind
    made: str
    """When, in UTC."""
    signature: Signature
    output_shape: tuple[int, ...]
    """Of one sample's outputs."""
    output_dtype: str = "float32"
    tells_classes: bool = False
    """Outputs are scores of classes, of which softmax makes probabilities."""
    network: Architecture | None = None
    """None where the model is code of its own."""
    origin: Origin
    compared: Compared
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every other file."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the packages that made it."""

    def __post_init__(self) -> None:
        """Refuse what no request could have, before memory is taken for it."""
        takes, pictures = self.signature, self.signature.pictures
        for kind in (takes.dtype, self.output_dtype):
            if kind not in DATATYPES:
                raise ConfigError(
                    f"dtype = {shown(kind)} cannot be served: it must be one of"
                    f" {', '.join(DATATYPES)}"
                )
        for shape in (takes.shape, self.output_shape):
            if any(size < 1 for size in shape) or math.prod(shape) > MOST_NUMBERS:
                raise ConfigError(
                    f"shape = {shown(list(shape))} must have sizes of 1 and more, and at most"
                    f" {MOST_NUMBERS:,} numbers"
                )
        if pictures is None:
            return
        square = (pictures.channels, pictures.size, pictures.size)
        per_channel = len(pictures.mean) == len(pictures.deviation) == pictures.channels
        if takes.shape != square or not per_channel or not all(pictures.deviation):
            raise ConfigError(
                f"pictures = {shown(pictures)} do not become samples of shape"
                f" {list(takes.shape)}: size, channels, mean and deviation must fit it"
            )


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What serving.json says: which versions of a model are served, and to whom."""

    policy: Literal["latest", "all", "specific"] = "latest"
    versions: tuple[int, ...] = ()
    """For `specific`."""
    labels: dict[str, int] = field(default_factory=dict)
    """Versions by name, which are served besides; `stable` answers requests that name none."""
    canary_percent: float = rule(default=0.0, minimum=0, maximum=100)
    """How many of the requests that name no version the version labelled `canary` answers."""
