"""What computing and sums do to each other, and update times by batch size."""

from __future__ import annotations

import threading
import time

import pytest

from paceline.config import config_from
from paceline.cost.transfer import hindrance
from paceline.hardware.links import Computing
from paceline.plan.candidates import candidate
from paceline.schema import NodePlan
from paceline.schema.machines import AllReduceCurve, Measured, exactly
from paceline.workflow.race import time_sizes


def curve(**figures: Measured) -> AllReduceCurve:
    return AllReduceCurve(backend="gloo", hosts=("a", "b"), points=(), **figures)


def test_hindrance_of_a_curve() -> None:
    assert hindrance(curve(), 1e8) == {"slowdown": 1.0, "taken": 0.0}
    found = hindrance(curve(slowdown=exactly(1.25), computing_left=exactly(0.7)), 1e8)
    assert found == {"slowdown": 1.25, "taken": pytest.approx(0.3)}
    # both at once is never slower than taking turns
    found = hindrance(curve(slowdown=exactly(2.0), computing_left=exactly(0.1)), 1e8)
    assert found == {"slowdown": 2.0, "taken": 0.5}
    # without a trial: processor time per byte at the rate of the wire
    assert hindrance(curve(cpu_per_byte=exactly(2e-9)), 1e8)["taken"] == pytest.approx(0.2)


def test_computing_counts_and_ends() -> None:
    with Computing() as computing:
        end = time.monotonic() + 300
        while computing.count == 0 and time.monotonic() < end:
            time.sleep(0.01)
        assert computing.count > 0
    assert not [t for t in threading.enumerate() if t.name.startswith("paceline-load")]


@pytest.mark.slow
def test_every_batch_size_is_timed() -> None:
    config = config_from({"workload.model": "shallow_cnn", "workload.data": "digits"})
    found = time_sizes(config, candidate(NodePlan()), [16, 4], seconds=0.1)
    assert set(found) == {16, 4}
    assert all(len(times) >= 2 and min(times) > 0 for times in found.values())
