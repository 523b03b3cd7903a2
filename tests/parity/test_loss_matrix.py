"""Every loss of `step_models` over every exchange between nodes: exact, or refused in a sentence.

The strategies of one node are held against the same losses in test_steps.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from node_series import Run, refusal, train_series
from test_steps import ROUNDING, UNEQUAL, expected, settings

from paceline.exchange import COMPRESSED, EXCHANGES
from paceline.schema import NodePlan

LOSSES = (
    "label smoothing",
    "a parameter term",
    "class weights",
    "padding",
    "few that count",
    "sum",
)
BY_SAMPLES = ("label smoothing", "a parameter term")
"""Means over samples; the others say by what they are one."""
SUMS = ("allreduce", "ring", "reduce_broadcast")
SERVED = [*UNEQUAL, NodePlan(strategy="threads", share=0.0)]
REFUSING: dict[str, tuple[str, list[NodePlan], tuple[str, ...]]] = {
    "bf16": ("allreduce", UNEQUAL, ("exchange.compression=bf16",)),
    "powersgd": ("allreduce", UNEQUAL, ("exchange.compression=powersgd",)),
    "parameter_server, sync": ("parameter_server", SERVED, ("exchange.mode=sync",)),
}
OWN_LOSS = ("averaging", "hogwild")
"""Nodes follow their own losses, whatever these are means by, and agree on weights afterwards: not
exact by what they are, and used only when they are asked for."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.world_size(2)]


def difference(task: str, found: dict[str, torch.Tensor]) -> float:
    wanted = expected(task, None)
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def test_every_exchange_has_its_place_here() -> None:
    places = {*SUMS, *OWN_LOSS, *(kind for kind, _, _ in REFUSING.values())}
    assert places == set(EXCHANGES)
    assert {how for _, how in COMPRESSED} <= REFUSING.keys()


def test_sums_are_exact_for_every_loss(tmp_path: Path) -> None:
    cases = [(task, exchange) for exchange in SUMS for task in LOSSES]
    runs = [Run(exchange, settings(task), UNEQUAL) for task, exchange in cases]
    for (task, exchange), found in zip(cases, train_series(tmp_path, runs), strict=True):
        assert difference(task, found) <= ROUNDING, (task, exchange)


@pytest.mark.world_size(3)
def test_servers_are_exact_for_sums_and_means_over_samples(tmp_path: Path) -> None:
    kind, nodes, changes = REFUSING["parameter_server, sync"]
    tasks = (*BY_SAMPLES, "sum")
    runs = [Run(kind, (*settings(task), *changes), nodes) for task in tasks]
    for task, found in zip(tasks, train_series(tmp_path, runs), strict=True):
        assert difference(task, found) <= ROUNDING, task


@pytest.mark.world_size(3)
@pytest.mark.parametrize("how", REFUSING)
def test_what_does_not_add_up_weights_refuses_every_loss_that_has_them(
    tmp_path: Path, how: str
) -> None:
    kind, nodes, changes = REFUSING[how]
    for task in ("class weights", "padding", "few that count"):
        run = Run(kind, (*settings(task), *changes), nodes)
        assert "returns a weight, which this exchange" in refusal(tmp_path / task, run), task
