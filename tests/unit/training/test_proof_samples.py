"""How many samples a plan is proved with, and how it divides them."""

from __future__ import annotations

import pytest

from paceline.schema import NodePlan, Plan
from paceline.training.proof_samples import division, update_sizes

PLANS = {
    "processes": ((NodePlan(strategy="processes", processes=2),), (5, 4), [3, 2]),
    "replicas": ((NodePlan(strategy="replicas", replicas=2),), (5, 4), [3, 2]),
    "stages": ((NodePlan(strategy="pipeline", stages=2, micro_batches=2),), (6, 4), [3, 3]),
    "hosts": (
        (NodePlan(share=0.75), NodePlan(share=0.25, strategy="replicas", replicas=2)),
        (15, 14),
        [11, 2, 2],
    ),
    "zero": ((NodePlan(share=1.0), NodePlan(share=0.0)), (2, 1), [2]),
}


@pytest.mark.parametrize("name", PLANS)
def test_few_samples_in_unequal_parts(name: str) -> None:
    nodes, sizes, parts = PLANS[name]
    plan = Plan(nodes=nodes, batch_size=64)
    assert update_sizes(plan, 1000) == sizes
    assert division(plan, sizes[0]) == parts
    assert all(sum(division(plan, total)) == total for total in range(1, 65))


def test_no_more_than_a_batch_and_the_data_have() -> None:
    plan = Plan(nodes=(NodePlan(strategy="processes", processes=4),), batch_size=4)
    assert update_sizes(plan, 1000) == (4, 4)
    assert update_sizes(Plan(nodes=plan.nodes, batch_size=64), 3) == (3, 3)
