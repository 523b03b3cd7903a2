"""Legs over nodes: whatever nodes, exchange, shares and order, the weights are one process's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from leg_nodes import LegsRun, everyone, leg, train_legs_over_nodes
from node_runs import metrics, state
from runs import assert_same, base_changes
from safetensors.torch import load_file

from paceline import api
from paceline.config import load_config
from paceline.schema.legs import Leg, merged, read_legs
from paceline.workflow.partitioning import partitioned

OPTIMIZERS = {
    "momentum": ("optimizer.name=sgd", "optimizer.learning_rate=0.01", "optimizer.momentum=0.9"),
    "adam": ("optimizer.name=adam",),
}
EPOCHS = "train.epochs=3"  # fifteen updates, each fifth of them smaller
OWN = Path(__file__).with_name("own_models.py")
NORMALISED = (f"workload.model={OWN}:normalised", "workload.model_options={}")


@pytest.fixture(scope="module")
def layers() -> tuple[str, ...]:
    """Those of the model that can be split over two nodes."""
    config = api.resolve(load_config(None, base_changes()))
    found = partitioned(config, everyone(2)).feature_layers
    assert found
    return found


def script(nodes: int, seed: int, layers: tuple[str, ...] = (), every: int = 3) -> list[Leg]:
    """Legs of three updates: some alone, some together, each time in another way."""
    chance = random.Random(seed)
    legs: list[Leg] = []
    for number, first in enumerate(range(0, 15, every)):
        others = list(range(1, nodes))
        # Never without: all nodes in the second leg, one without the first node in the third.
        count = {1: len(others)}.get(number, chance.randint(0, len(others)))
        members = (0, *sorted(chance.sample(others, count)))
        members = members if number != 2 else tuple(others)
        kinds = ["allreduce", "ring", "reduce_broadcast"] + (["split"] if layers else [])
        kind = chance.choice(kinds) if number != 1 or not layers else "split"
        split = kind == "split" and len(members) > 1
        exchange = "allreduce" if kind == "split" or len(members) == 1 else kind
        shares = tuple(chance.choice((1.0, 2.0, 3.0)) for _ in members)
        legs.append(
            leg(
                nodes,
                first,
                every,
                members,
                shares=shares,
                layers=layers if split else (),
                exchange=exchange,
                bucket_mb=chance.choice((None, 0.05)),
                memory_format=chance.choice(("contiguous", "channels_last")),
            )
        )
    return legs


def compare(runs: list[LegsRun], paths: list[Path], alone) -> None:
    for run, path in zip(runs, paths, strict=True):
        try:
            # Adam makes a step of full length of a gradient that is nothing but rounding.
            assert_same(state(path), alone(run.changes), atol=1e-4)
        except AssertionError as error:
            names = [each.name for each in run.script]
            raise AssertionError(f"{run.changes} {names}: {error}") from None
        made = [(each.name, each.first, each.updates) for each in read_legs(path / "legs.jsonl")]
        assert made == [(each.name, each.first, each.updates) for each in merged(run.script)]
        assert [line["epoch"] for line in metrics(path)] == [1, 2, 3]


def runs(nodes: int, layers: tuple[str, ...]) -> list[LegsRun]:
    """The first has layers that are split, the second Adam, the third BatchNorm."""
    momentum, adam = ((*OPTIMIZERS[name], EPOCHS) for name in ("momentum", "adam"))
    return [
        LegsRun(nodes, momentum, script(nodes, 7 * nodes, layers if nodes == 2 else ())),
        LegsRun(nodes, adam, script(nodes, 7 * nodes + 1)),
        LegsRun(nodes, (*momentum, *NORMALISED), script(nodes, 7 * nodes + 2)),
    ]


@pytest.mark.world_size(2)
def test_ways_in_any_order(layers, alone, tmp_path: Path) -> None:
    series = runs(2, layers)[:1]
    compare(series, train_legs_over_nodes(tmp_path, series), alone)


def ranked(seed: int) -> list[Leg]:
    """Legs of two nodes whose cores are used in every way that nodes may have, in turns."""
    chance = random.Random(seed)
    plain: dict[str, Any] = {}
    processes = {"strategy": "processes", "processes": 2}
    replicas = {"strategy": "replicas", "replicas": 2}
    locals_ = [(processes, processes), (processes,), (plain, processes), (replicas, processes)]
    chance.shuffle(locals_)
    legs = []
    for number, each in enumerate([*locals_, (processes, plain)]):
        members = (0, 1) if len(each) > 1 else (chance.choice((0, 1)),)
        exchange = chance.choice(("allreduce", "ring", "reduce_broadcast"))
        shares = tuple(chance.choice((1.0, 2.0, 3.0)) for _ in members)
        kind = exchange if len(members) > 1 else "allreduce"
        legs.append(leg(2, 3 * number, 3, members, shares=shares, locals_=each, exchange=kind))
    return legs


@pytest.mark.slow
@pytest.mark.world_size(4)
@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi4py", marks=pytest.mark.mpi)])
def test_nodes_with_ranks_of_their_own(backend: str, alone, tmp_path: Path) -> None:
    """Two nodes of two ranks: momentum, Adam, BatchNorm."""
    momentum, adam = ((*OPTIMIZERS[name], EPOCHS) for name in ("momentum", "adam"))
    every = (momentum, adam, (*momentum, *NORMALISED))
    series = [LegsRun(2, changes, ranked(seed)) for seed, changes in enumerate(every)]
    compare(series, train_legs_over_nodes(tmp_path, series, backend=backend), alone)


@pytest.mark.slow
@pytest.mark.world_size(4)
@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi4py", marks=pytest.mark.mpi)])
def test_more_ways(backend: str, nodes: int, layers, alone, tmp_path: Path) -> None:
    series = runs(nodes, layers)
    series = series[1:] if backend == "gloo" and nodes == 2 else series
    compare(series, train_legs_over_nodes(tmp_path, series, backend=backend), alone)


def weights_of(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the optimizer's state, which at the end of many updates is little but rounding."""
    return {name: tensor for name, tensor in found.items() if "|" not in name}


def paced(name: str) -> tuple[str, ...]:
    """Settings of a hundred updates of a model of leg_models.py, whose computing is sleeping."""
    models = Path(__file__).with_name("leg_models.py")
    length = ("train.epochs=20", "pilot.budget=1.0")
    return (
        *OPTIMIZERS["momentum"], *length,
        f"workload.model={models}:{name}", "workload.model_options={}",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_the_pilot_decides_and_a_run_is_repeated_bit_for_bit(alone, tmp_path: Path) -> None:
    """Begun on one node, tried on both; then the same legs once more, and the same weights."""
    changes = paced("paced")
    (first,) = train_legs_over_nodes(tmp_path / "first", [LegsRun(2, changes)])
    assert_same(weights_of(state(first)), weights_of(alone(changes)), atol=1e-4)
    legs = read_legs(first / "legs.jsonl")
    assert legs[0].name == "host-0 alone"
    assert any(each.name.startswith("host-0 and host-1") for each in legs)
    assert sum(each.updates for each in legs) == 100
    (again,) = train_legs_over_nodes(tmp_path / "again", [LegsRun(2, changes, legs)])
    one, two = (
        load_file(path / "checkpoints" / "latest" / "model.safetensors") for path in (first, again)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_plan_that_fails_costs_its_leg(alone, tmp_path: Path) -> None:
    """A model that one node cannot build, and one whose batches cannot be divided."""
    series = [LegsRun(2, paced(name)) for name in ("elsewhere_missing", "centred")]
    paths = train_legs_over_nodes(tmp_path, series)
    for run, path, word in zip(series, paths, ("no such file", "rest of the batch"), strict=True):
        legs = read_legs(path / "legs.jsonl")
        failed = [each for each in legs if each.ended]
        assert len(failed) == 1, [(each.name, each.ended) for each in legs]
        assert word in failed[0].ended
        used = {each.name.partition(",")[0] for each in legs if each.updates}
        assert used == {"host-0 alone"}
        assert_same(weights_of(state(path)), weights_of(alone(run.changes)), atol=1e-4)


BOTH = "host-0 and host-1"
RANKS = f"{BOTH}, processes 2x1"
"""Both nodes, with two ranks each."""


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_a_killed_rank_inside_a_node_costs_its_leg(alone, tmp_path: Path) -> None:
    model = Path(__file__).with_name("leg_models.py")
    changes = (*paced("paced"), f"workload.model={model}:Killed")
    killed = (*changes, f"workload.model_options.flag={tmp_path / 'killed'}")
    run = LegsRun(2, killed, threads=2, wants=(RANKS, BOTH))
    (path,) = train_legs_over_nodes(tmp_path / "run", [run])
    legs = read_legs(path / "legs.jsonl")
    told = [(each.name, each.updates, each.ended) for each in legs]
    failed = [each for each in legs if each.ended]
    assert [each.name for each in failed] == [RANKS], told
    assert "killed by SIGKILL" in failed[0].ended
    assert (tmp_path / "killed").exists()
    assert sum(each.updates for each in legs) == 100
    later = legs[legs.index(failed[0]) + 1 :]
    assert any(each.name == BOTH and each.updates for each in later), told
    assert_same(weights_of(state(path)), weights_of(alone(changes)), atol=1e-4)


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_ranks_inside_nodes_stand_by_while_training_goes_on(alone, tmp_path: Path) -> None:
    changes = paced("paced")
    run = LegsRun(2, changes, threads=2, wants=(RANKS,))
    (path,) = train_legs_over_nodes(tmp_path / "run", [run])
    legs = read_legs(path / "legs.jsonl")
    told = [(each.name, each.updates, each.ended) for each in legs]
    assert not any(each.ended for each in legs), told
    assert {each.name for each in legs} == {"host-0 alone", RANKS}, told
    assert [node.ranks for node in legs[-1].plan.nodes] == [2, 2]
    assert sum(each.updates for each in legs) == 100
    assert_same(weights_of(state(path)), weights_of(alone(changes)), atol=1e-4)
