"""The estimate of memory: its terms add up, and more of anything needs more."""

from __future__ import annotations

import pytest

from paceline.cost.memory import BASE_MB, WORKSPACE, Footprint, estimate_mb
from paceline.schema import NodePlan

FOOTPRINT = Footprint(parameter_mb=100.0, activation_mb=2.0, optimizer_slots=2, batch_mb=5.0)


def estimate(
    node: NodePlan, *, batch_size: int = 10, precision: str = "fp32", of: Footprint = FOOTPRINT
) -> float:
    return estimate_mb(of, node, batch_size=batch_size, precision=precision)


def test_one_process_by_hand() -> None:
    # weights, one gradient, two moments; ten samples; two batches of inputs
    expected = BASE_MB + 100 * 4 + 10 * 2 * (1 + WORKSPACE) + 2 * 5
    assert estimate(NodePlan(strategy="threads", threads=4)) == expected


def test_each_strategy_against_one_process() -> None:
    alone = estimate(NodePlan())
    assert estimate(NodePlan(strategy="replicas", replicas=3)) == alone + 2 * 100
    two = NodePlan(strategy="processes", processes=2)
    assert estimate(two) == alone + BASE_MB + 3 * 100
    ddp = NodePlan(strategy="processes", processes=2, sync="ddp")
    assert estimate(ddp) == estimate(two) + 3 * 100  # weights and moments once more
    staged = NodePlan(strategy="pipeline", stages=4)
    assert estimate(staged) == alone + 3 * BASE_MB + 100


@pytest.mark.parametrize(
    "node",
    [
        NodePlan(),
        NodePlan(strategy="replicas", replicas=2),
        NodePlan(strategy="processes", processes=4),
        NodePlan(strategy="hybrid", replicas=2, stages=2),
    ],
)
def test_more_of_anything_needs_more(node: NodePlan) -> None:
    base = estimate(node)
    assert estimate(node, batch_size=11) > base
    for change in ({"parameter_mb": 101.0}, {"activation_mb": 2.1}, {"optimizer_slots": 3}):
        numbers = {
            "parameter_mb": 100.0,
            "activation_mb": 2.0,
            "optimizer_slots": 2,
            "batch_mb": 5.0,
        }
        assert estimate(node, of=Footprint(**(numbers | change))) > base  # type: ignore[arg-type]


def test_bf16_saves_activations_and_costs_a_copy_of_the_weights() -> None:
    large_batch = Footprint(parameter_mb=1.0, activation_mb=10.0, optimizer_slots=0)
    large_model = Footprint(parameter_mb=1000.0, activation_mb=0.1, optimizer_slots=0)
    assert estimate(NodePlan(), of=large_batch, precision="bf16") < estimate(
        NodePlan(), of=large_batch
    )
    assert estimate(NodePlan(), of=large_model, precision="bf16") > estimate(
        NodePlan(), of=large_model
    )
