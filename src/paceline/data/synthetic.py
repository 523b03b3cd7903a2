"""`synthetic`: made samples of any shape, each computed from its number alone."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data.base import DataRequest, Dataset, DataSpec, Source, fingerprint_of
from paceline.errors import DataError, shown

if TYPE_CHECKING:
    import torch

SPEC = DataSpec(
    name="synthetic",
    summary="made samples of any shape: a pattern per class plus noise; deterministic",
    image_size=32,
    channels=3,
    classes=10,
    obtain="nothing to do: samples are computed when they are asked for",
)

# How many different noise pictures there are; each sample adds one, shifted by its own amount.
NOISE_PICTURES = 64
MOST_NUMBERS = 2**26
"""Of a sample: the noise pictures then take 16 GB."""
MOST_CLASSES, MOST_SAMPLES = 2**20, 2**30
"""Each class has a picture in memory, each sample its label."""


class SyntheticSource(Source):
    """Pattern of the class plus noise; memory does not grow with the number of samples."""

    def __init__(self, shape: tuple[int, ...], classes: int, count: int, start: int) -> None:
        self.sample_shape = shape
        self._count, self._start = count, start
        self._size = int(np.prod(shape))
        generator = np.random.default_rng([20200117, classes, *shape])
        self._patterns = generator.standard_normal((classes, self._size), dtype=np.float32)
        self._noise = generator.standard_normal((NOISE_PICTURES, self._size), dtype=np.float32)
        self.targets = (np.arange(start, start + count, dtype=np.int64)) % classes
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        assert self.targets is not None
        labels = np.take(self.targets, indices)
        out = np.empty((len(labels), self._size), dtype=np.float32)
        for row, index in enumerate(np.asarray(indices).tolist()):
            number = index + self._start
            # Steps that share no factor with the counts, so that neighbours look different.
            picture = self._noise[(number * 37 + number // NOISE_PICTURES) % NOISE_PICTURES]
            shift = (number * 7919) % self._size
            out[row, shift:] = picture[: self._size - shift]
            out[row, :shift] = picture[self._size - shift :]
            out[row] += 0.5 * self._patterns[labels[row]]
        return (
            torch.from_numpy(out.reshape(len(labels), *self.sample_shape)),
            torch.from_numpy(labels),
        )


def _whole_number(options: Any, key: str, default: int, most: int) -> int:
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise DataError(
            f"{key} = {shown(value)} of data set 'synthetic' must be a whole number above 0,"
            f" and at most {most}"
        )
    return value


def open_synthetic(request: DataRequest) -> Dataset:
    """Open made data; options: shape, classes, samples, test_samples."""
    options = request.options
    request.check_options("shape", "classes", "samples", "test_samples")
    size, channels = request.image_size or SPEC.image_size, request.channels or SPEC.channels
    shape = options.get("shape", [channels, size, size])
    if (
        not isinstance(shape, list | tuple)
        or not shape
        or not all(isinstance(length, int) and length > 0 for length in shape)
        or math.prod(shape) > MOST_NUMBERS
    ):
        raise DataError(
            f"shape = {shown(shape)} of data set 'synthetic' must be a list of whole numbers above"
            f" 0, such as [3, 32, 32], and at most {MOST_NUMBERS} numbers in all"
        )
    classes = _whole_number(options, "classes", 10, MOST_CLASSES)
    count = _whole_number(options, "samples", 1024, MOST_SAMPLES)
    test_count = _whole_number(options, "test_samples", max(1, count // 4), MOST_SAMPLES)
    if request.limit:
        count, test_count = min(count, request.limit), min(test_count, request.limit)
    return Dataset(
        name=SPEC.name,
        train=SyntheticSource(tuple(shape), classes, count, 0),
        test=SyntheticSource(tuple(shape), classes, test_count, count),
        classes=tuple(str(label) for label in range(classes)),
        sample_shape=tuple(shape),
        fingerprint=fingerprint_of(["synthetic 1", str((list(shape), classes, count, test_count))]),
    )
