"""How large batches are is measured on the model: here on one that takes a known time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paceline.schema.signature import Signature
from paceline.schema.version import Compared, Origin, Version
from paceline.serve.loader import Servable, prepare
from paceline.serve.setup import LONE_TURNS, LoneChoice, Run, measured

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


@pytest.mark.parametrize(
    ("once", "each", "batch"),
    [
        (0.0, 0.06, 1),  # a batch of 4 takes long and gains nothing
        (0.1, 0.002, 64),  # a batch takes long whatever its size, as one of many weights does
        (0.001, 0.0, 64),  # short: nothing is lost
        (0.3, 0.0, 1),  # the next would take too long to try
    ],
)
def test_batches_are_as_large_as_they_gain(once: float, each: float, batch: int) -> None:
    now = 0.0

    def run(inputs: np.ndarray) -> np.ndarray:
        nonlocal now
        now += once + each * len(inputs)
        return inputs

    with ThreadPoolExecutor(1) as pool:
        setup = measured(
            ABOUT, run, pool, workers=1, threads=1, most=64, clock=lambda: now, until=math.inf
        )
    assert setup.batch == batch


def test_a_busy_machine_does_not_keep_a_version_from_answering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.serve.loader.LONGEST_MEASURING", 0.0)
    monkeypatch.setattr("paceline.serve.loader.usable_cores", lambda: 2)
    runs: list[int] = []

    def run(inputs: np.ndarray) -> np.ndarray:
        runs.append(len(inputs))
        time.sleep(0.01)
        return inputs

    servable = prepare(ABOUT, lambda threads, lone: (run, lambda: None), 0)
    servable.close()
    assert set(runs) == {1}
    assert (servable.setup.batch, servable.alone) == (1, None)


def test_a_batch_per_core_goes_before_one_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level in samples per second; the second session is kept if it answers one sooner."""
    monkeypatch.setattr("paceline.serve.loader.LONGEST_MEASURING", math.inf)
    monkeypatch.setattr("paceline.serve.loader.usable_cores", lambda: 4)

    def prepared(one_thread: float, all_threads: float) -> Servable:
        def maker(threads: int, lone: bool) -> tuple[Run, Callable[[], None]]:
            seconds = one_thread if threads == 1 else all_threads

            def run(inputs: np.ndarray) -> np.ndarray:
                time.sleep(seconds)
                return inputs

            return run, lambda: None

        servable = prepare(ABOUT, maker, 100, 1)
        servable.close()
        return servable

    kept = prepared(0.1, 0.04)
    assert (kept.setup.workers, kept.setup.threads, kept.size) == (4, 1, 200)
    assert kept.alone is not None
    single = prepared(0.04, 0.08)
    assert (single.setup.workers, single.alone, single.size) == (4, None, 100)
    wide = prepared(0.4, 0.02)
    assert (wide.setup.workers, wide.setup.threads, wide.alone) == (1, 4, None)


def test_lone_requests_go_where_they_are_faster_now() -> None:
    choice = LoneChoice()
    seconds = {0: 0.01, 1: 0.005}

    def share() -> float:
        chosen = []
        for _ in range(10 * LONE_TURNS):
            chosen.append(choice.next())
            choice.note(chosen[-1], seconds[chosen[-1]])
        return sum(chosen[LONE_TURNS * 5 :]) / (5 * LONE_TURNS)

    assert share() == 1 - 1 / LONE_TURNS
    seconds[1] = 0.05  # another program has come
    assert share() == 1 / LONE_TURNS
    seconds[1] = 0.005
    assert share() == 1 - 1 / LONE_TURNS
