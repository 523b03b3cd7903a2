"""How large batches are is measured on the model: here on one that takes a known time."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from paceline.schema.signature import Signature
from paceline.schema.version import Compared, Origin, Version
from paceline.serve import loader
from paceline.serve.loader import prepare

ABOUT = Version(
    kind="onnx",
    made="2026-11-18T00:00:00+00:00",
    signature=Signature(shape=(2,)),
    output_shape=(2,),
    output_dtype="float32",
    tells_classes=False,
    network=None,
    origin=Origin(run="", update=1, epoch=1, commit=None, metrics={}),
    compared=Compared(samples=0, largest=0.0, tolerance=0.0),
    versions={},
)


class Clock(threading.local):
    """Stands in for the module `time`: every worker's own, moved by the model alone."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("once", "each", "batch"),
    [
        (0.0, 0.06, 1),  # a batch of 4 takes long and gains nothing
        (0.1, 0.002, 64),  # a batch takes long whatever its size, as one of many weights does
        (0.0, 0.0005, 64),  # short: nothing is lost
        (0.3, 0.0, 1),  # the next would take too long to try
    ],
)
def test_batches_are_as_large_as_they_gain(
    once: float, each: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(loader, "time", clock)

    def run(inputs: np.ndarray) -> np.ndarray:
        clock.now += once + each * len(inputs)
        return inputs

    servable = prepare(ABOUT, lambda threads: (run, lambda: None), 0)
    servable.close()
    assert servable.setup.batch == batch
