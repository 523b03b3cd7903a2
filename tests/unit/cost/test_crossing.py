"""What goes between the cores of a node in every update."""

from __future__ import annotations

import pytest

from paceline.cost.crossing import crossing_mb
from paceline.cost.memory import Footprint
from paceline.plan.candidates import structures
from paceline.schema import NodePlan

FOOTPRINT = Footprint(parameter_mb=10.0, activation_mb=1.0, optimizer_slots=0)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (NodePlan(), 0.0),
        (NodePlan(strategy="threads", threads=2), 8.0),
        (NodePlan(strategy="threads", threads=4), 12.0),
        (NodePlan(strategy="replicas", replicas=2), 20.0),
        (NodePlan(strategy="processes", processes=2), 20.0),
        (NodePlan(strategy="processes", processes=4), 60.0),
        (NodePlan(strategy="processes", processes=2, threads=2), 28.0),
        (NodePlan(strategy="pipeline", stages=2), None),
        (NodePlan(strategy="hogwild", processes=2), None),
    ],
    ids=lambda value: value.strategy if isinstance(value, NodePlan) else str(value),
)
def test_activations_cross_between_threads_and_weights_between_copies(
    node: NodePlan, expected: float | None
) -> None:
    assert crossing_mb(FOOTPRINT, node, batch_size=8) == expected


def test_only_one_core_moves_nothing() -> None:
    for node in structures(8, 64, elementwise=True):
        moved = crossing_mb(FOOTPRINT, node, batch_size=64)
        assert (moved == 0.0) == (node.strategy == "sequential")
