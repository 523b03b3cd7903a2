"""Legs: whatever the plans and their order, the weights are those of one process."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from node_runs import state
from runs import assert_same, base_changes, train_weights
from safetensors.torch import load_file

from paceline import api
from paceline.config import load_config
from paceline.plan.candidates import candidate
from paceline.schema import NodePlan, Plan
from paceline.schema.legs import Leg, merged, read_legs

PLANS = {
    1: [NodePlan(strategy="sequential"), NodePlan(strategy="threads", threads=2),
        NodePlan(strategy="replicas", replicas=2)],
    2: [NodePlan(strategy="processes", processes=2),
        NodePlan(strategy="pipeline", stages=2, micro_batches=2)],
    4: [NodePlan(strategy="processes", processes=4),
        NodePlan(strategy="hybrid", replicas=2, stages=2, micro_batches=2)],
}  # fmt: skip
OPTIMIZERS = {
    "momentum": ("optimizer.name=sgd", "optimizer.learning_rate=0.01", "optimizer.momentum=0.9"),
    "adam": ("optimizer.name=adam",),
}
OWN = Path(__file__).with_name("own_models.py")
NORMALISED = (f"workload.model={OWN}:normalised", "workload.model_options={}")
EPOCHS = "train.epochs=3"  # fifteen updates, each fifth of them smaller


def script(size: int, seed: int, updates: int = 15, every: int = 3) -> list[Leg]:
    """Legs of three updates, each with another plan; the last ranks are those of `size`."""
    chance = random.Random(seed)
    nodes = [node for ranks, group in PLANS.items() if ranks <= size for node in group]
    legs: list[Leg] = []
    for first in range(0, updates, every):
        node = chance.choice(PLANS[size] if first == every else nodes)
        layout = chance.choice(("contiguous", "channels_last"))
        plan = Plan(nodes=(node,), memory_format=layout, batch_size=24)
        name = candidate(node, "fp32", layout).name
        if legs and legs[-1].name == name:
            legs[-1] = Leg(name=name, plan=plan, first=legs[-1].first, updates=2 * every)
        else:
            legs.append(Leg(name=name, plan=plan, first=first, updates=every))
    return legs


def train_in_legs(folder: Path, legs: list[Leg], *changes: str) -> Path:
    settings, directory, _ = api.begin(
        load_config(None, (*base_changes(), EPOCHS, "local.strategy=auto", *changes)), run=folder
    )
    start = api.TrainingStart(config=settings, run=directory, script=legs, silent=True)
    result = api.run_training(start)
    assert result.summary["finished"]
    return folder


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))]
)
@pytest.mark.parametrize("optimizer", ["momentum", pytest.param("adam", marks=pytest.mark.slow)])
def test_plans_in_any_order(size: int, optimizer: str, alone, tmp_path: Path) -> None:
    changes = (*OPTIMIZERS[optimizer], EPOCHS)
    legs = script(size, seed=size * 7 + len(optimizer))
    run = train_in_legs(tmp_path / "run", legs, *changes)
    # Adam makes a step of full length of a gradient that is nothing but rounding.
    assert_same(state(run), alone(changes), atol=1e-4)
    made = [(leg.name, leg.first, leg.updates) for leg in read_legs(run / "legs.jsonl")]
    assert made == [(leg.name, leg.first, leg.updates) for leg in merged(legs)]


@pytest.mark.world_size(4)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_batch_norm_in_any_order(size: int, alone, tmp_path: Path) -> None:
    """Whatever divides a batch, BatchNorm sees all of it, in every leg; stages one micro-batch."""
    changes = (*OPTIMIZERS["momentum"], EPOCHS, *NORMALISED)
    legs = [
        leg
        if leg.plan.nodes[0].stages == 1
        else dataclasses.replace(leg, name=f"undivided {number}", plan=_undivided(leg.plan))
        for number, leg in enumerate(script(size, seed=size))
    ]
    run = train_in_legs(tmp_path / "run", legs, *changes)
    assert_same(state(run), alone(changes), atol=1e-4)
    assert {leg.plan.nodes[0].strategy for leg in read_legs(run / "legs.jsonl")} >= {"processes"}


def _undivided(plan: Plan) -> Plan:
    node = dataclasses.replace(plan.nodes[0], micro_batches=1)
    return dataclasses.replace(plan, nodes=(node,))


def test_dropout_draws_the_same_in_every_leg_of_one_worker(tmp_path: Path) -> None:
    changes = ("workload.model_options.dropout=0.5",)
    plans = [NodePlan(strategy="threads", threads=2), NodePlan(strategy="sequential")]
    legs = [
        Leg(
            name=candidate(plans[number % 2]).name,
            plan=Plan(nodes=(plans[number % 2],), batch_size=24),
            first=3 * number,
            updates=3,
        )
        for number in range(5)
    ]
    run = train_in_legs(tmp_path / "run", legs, *changes)
    found = load_file(run / "checkpoints" / "latest" / "model.safetensors")
    # Other draws differ by 1e-2; two threads and one by 2e-5 where a ReLU's input is rounding.
    assert_same(found, train_weights(tmp_path, EPOCHS, *changes), atol=1e-4)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_run_is_repeated_bit_for_bit(run_cli, tmp_path: Path) -> None:
    legs = script(2, seed=1)
    run = train_in_legs(tmp_path / "run", legs)
    done = run_cli("train", run / "config.toml", "--run", tmp_path / "again", timeout=600)
    assert done.returncode == 0, done.stderr
    first, second = (
        load_file(folder / "checkpoints" / "latest" / "model.safetensors")
        for folder in (run, tmp_path / "again")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    again = read_legs(tmp_path / "again" / "legs.jsonl")
    assert [leg.name for leg in again] == [leg.name for leg in legs]
