"""Every loss of `step_models` over every exchange between nodes: exact, or refused in a sentence.

The strategies of one node are held against the same losses in test_steps.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from node_series import Run, refusal, train_series
from test_steps import COUNTED, ROUNDING, UNEQUAL, expected, loss_of, settings

from paceline.errors import UnsupportedError
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
    "parameter_server, async": ("parameter_server", SERVED, ("exchange.mode=async",)),
}
AS_LOSSES = {
    "loss with class weights": "weighted_loss",
    "loss that is a sum": "summed_loss",
    "loss with label smoothing": "smoothed_loss",
    "loss with ignore_index": "ignoring_loss",
}
"""Losses of outputs, which split layers need; a parameter term is none."""
SPLIT = ("exchange.partition=manual", 'exchange.layers=["layers.0", "layers.2"]')
OWN_LOSS = ("averaging", "hogwild")
"""Nodes follow their own losses, whatever these are means by, and agree on weights afterwards: not
exact by what they are, and used only when they are asked for."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.world_size(2)]


def difference(task: str, found: dict[str, torch.Tensor]) -> float:
    wanted = expected(task, None)
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def weights_of(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in found.items() if "|" not in name}


def as_loss(task: str) -> tuple[str, ...]:
    """The same as a loss of the outputs, with split layers."""
    kept = [each for each in settings("plain") if not each.startswith("workload.step")]
    here = f"{Path(__file__).parent}/step_models.py"
    return (*kept, f"workload.loss={here}:{AS_LOSSES[task]}", *SPLIT)


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
    runs = [Run(kind, (*settings(task), *changes), nodes) for task in COUNTED]
    for task, found in zip(COUNTED, train_series(tmp_path, runs), strict=True):
        assert difference(task, found) <= ROUNDING, task


@pytest.mark.world_size(3)
def test_servers_that_do_not_wait_train_the_same_losses(tmp_path: Path) -> None:
    """One worker alone is exact; of two, nobody promises more than that they train."""
    kind, nodes, changes = REFUSING["parameter_server, async"]
    alone = [NodePlan(strategy="threads"), nodes[-1]]
    cases = [(task, places) for task in COUNTED for places in (alone, nodes)]
    runs = [Run(kind, (*settings(task), *changes), places) for task, places in cases]
    for (task, places), found in zip(cases, train_series(tmp_path, runs), strict=True):
        if places is alone:
            assert difference(task, found) <= ROUNDING, task
        assert loss_of(task, weights_of(found)) < loss_of(task, None), task


def test_nodes_that_follow_their_own_losses_train_every_loss(tmp_path: Path) -> None:
    cases = [(task, exchange) for exchange in OWN_LOSS for task in LOSSES]
    runs = [Run(exchange, settings(task), UNEQUAL) for task, exchange in cases]
    for (task, exchange), found in zip(cases, train_series(tmp_path, runs), strict=True):
        assert loss_of(task, weights_of(found)) < loss_of(task, None), (task, exchange)


def test_split_layers_are_exact_for_every_loss_and_refuse_steps(tmp_path: Path) -> None:
    runs = [Run("allreduce", as_loss(task), UNEQUAL, split=True) for task in AS_LOSSES]
    for task, found in zip(AS_LOSSES, train_series(tmp_path, runs), strict=True):
        assert difference(task, found) <= ROUNDING, task
    for task in LOSSES:
        run = Run("allreduce", (*settings(task), *SPLIT), UNEQUAL, split=True)
        with pytest.raises(
            UnsupportedError, match=r"which (a step of your own does|only a step takes)"
        ):
            train_series(tmp_path / task, [run])


@pytest.mark.world_size(3)
@pytest.mark.parametrize("how", REFUSING)
def test_what_does_not_add_up_weights_refuses_every_loss_that_has_them(
    tmp_path: Path, how: str
) -> None:
    kind, nodes, changes = REFUSING[how]
    for task in ("class weights", "padding", "few that count"):
        run = Run(kind, (*settings(task), *changes), nodes)
        assert "returns a weight, which this exchange" in refusal(tmp_path / task, run), task
