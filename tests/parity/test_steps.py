"""Steps of the user's own: the weights of a plain loop on whole batches, however they are divided.

Weights are about 1; 1e-6 is what the order of sums may change (3e-6 where BatchNorm normalises).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from node_runs import train_nodes
from step_cases import Case, Found, run_cases, train
from torch.utils.data import default_collate

# isort: split
from step_models import BATCH, EPOCHS, RATE, TASKS, plain_loop

from paceline.schema import NodePlan

ROUNDING = 1e-6
NORMALISED = 3e-6
CLIP = 0.4
LOSSES = tuple(name for name, task in TASKS.items() if task.loss is not None)
STEPS = [name for name in TASKS if name not in LOSSES]
WEIGHTED = ("class weights", "padding", "few that count", "loss with ignore_index")
CUTS = "cuts a model of one input into stages, which a step of your own calls"
COUNTED = ("label smoothing", "a parameter term", "sum")
"""Means over samples, and sums: those whose parts need no weight."""
KNOWS_NO_WEIGHT = "none knows the weight of the whole batch"
REPLICAS = {"strategy": "replicas", "replicas": 3}
PROCESSES = {"strategy": "processes", "processes": 2}
DDP = {**PROCESSES, "sync": "ddp"}
PIPELINE = {"strategy": "pipeline", "stages": 2, "micro_batches": 2}
HYBRID = {"strategy": "hybrid", "replicas": 2, "stages": 2, "micro_batches": 2}


@cache
def expected(task: str, clip_norm: float | None) -> dict[str, torch.Tensor]:
    threads = torch.get_num_threads()
    try:
        return plain_loop(TASKS[task], clip_norm=clip_norm)
    finally:
        torch.set_num_threads(threads)


def alone(case: Case) -> Found:
    threads = torch.get_num_threads()
    try:
        return train(case, case.job())
    finally:
        torch.set_num_threads(threads)


def difference(case: Case, found: Found) -> float:
    assert not isinstance(found, str), f"{case}: {found}"
    wanted = expected(case.task, case.clip_norm)
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def loss_of(task: str, weights: dict[str, torch.Tensor] | None) -> float:
    """Of all samples at once; None: of the weights that training begins with."""
    torch.manual_seed(0)
    model, data = TASKS[task].model(), TASKS[task].data
    if weights is not None:
        model.load_state_dict(weights)
    with torch.no_grad():
        batch = (TASKS[task].collate or default_collate)([data[n] for n in range(len(data))])
        found = TASKS[task].called(model, batch)
    return float(found["loss"] if isinstance(found, dict) else found)


def check(cases: list[Case], found: list[Found]) -> None:
    for case, weights in zip(cases, found, strict=True):
        allowed = NORMALISED if "BatchNorm" in case.task else ROUNDING
        assert difference(case, weights) <= allowed, case


@pytest.mark.parametrize("task", TASKS)
def test_one_process(task: str) -> None:
    plain = Case(task=task, node={"strategy": "sequential"})
    assert difference(plain, alone(plain)) == 0.0
    cases = [
        Case(task=task, node={"strategy": "threads", "threads": 2}),
        Case(task=task, node=REPLICAS),
        Case(task=task, node=REPLICAS, clip_norm=CLIP),
    ]
    check(cases, [alone(case) for case in cases])


@pytest.mark.world_size(2)
def test_two_ranks(tmp_path: Path) -> None:
    cases = [Case(task=task, node=PROCESSES) for task in TASKS]
    cases += [Case(task=task, node=PROCESSES, clip_norm=CLIP) for task in ("padding", "sum")]
    cases += [Case(task=task, node=DDP) for task in STEPS]
    cases += [Case(task=task, node=PIPELINE) for task in LOSSES]
    refused = [(Case(task=task, node=PIPELINE), CUTS) for task in STEPS]
    hogwild = {**PROCESSES, "strategy": "hogwild"}
    refused += [(Case(task=task, node=hogwild), KNOWS_NO_WEIGHT) for task in WEIGHTED]
    apart = [Case(task=task, node=hogwild) for task in COUNTED]  # not exact, by what it is
    found = run_cases(tmp_path, [*cases, *apart, *(case for case, _ in refused)])
    check(cases, found[: len(cases)])
    for case, weights in zip(apart, found[len(cases) :], strict=False):
        assert not isinstance(weights, str), f"{case}: {weights}"
        assert loss_of(case.task, weights) < loss_of(case.task, None), case
    for (case, reason), said in zip(refused, found[len(cases) + len(apart) :], strict=True):
        assert reason in str(said), case


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_four_ranks(tmp_path: Path) -> None:
    cases = [Case(task=task, node=HYBRID) for task in LOSSES]
    cases += [Case(task=task, node={**PROCESSES, "processes": 4}) for task in STEPS]
    refused = [Case(task=task, node=HYBRID) for task in STEPS]
    found = run_cases(tmp_path, [*cases, *refused])
    check(cases, found[: len(cases)])
    for case, said in zip(refused, found[len(cases) :], strict=True):
        assert CUTS in str(said), case


def settings(task: str) -> tuple[str, ...]:
    """A task of `step_models` as a configuration names it."""
    found, here = TASKS[task], f"{Path(__file__).parent}/step_models.py"
    assert found.step is not None
    collate = () if found.collate is None else (f"workload.collate_fn={here}:padded",)
    return (
        f"workload.model={here}:{found.model.__name__}",
        f"workload.data={here}:{'texts' if collate else 'points'}",
        f"workload.step={here}:{found.step.__name__}",
        "workload.model_options={}",
        f"workload.batch_size={BATCH}",
        f"train.epochs={EPOCHS}",
        "optimizer.name=sgd",
        f"optimizer.learning_rate={RATE}",
        "optimizer.momentum=0.9",
        "optimizer.schedule=constant",
        "optimizer.warmup=0.0",
        *collate,
    )


def between_nodes(folder: Path, task: str, nodes: list[NodePlan], exchange: str) -> None:
    found = train_nodes(folder, nodes, *settings(task), exchange=exchange)
    weights = {name: value for name, value in found.items() if "|" not in name}
    check([Case(task=task, node={"strategy": "over hosts"})], [weights])


UNEQUAL = [NodePlan(strategy="threads", share=0.7), NodePlan(strategy="threads", share=0.3)]
RANKS = [NodePlan(strategy="processes", processes=2, share=0.6), UNEQUAL[1]]


@pytest.mark.world_size(2)
def test_weights_travel_between_nodes(tmp_path: Path) -> None:
    between_nodes(tmp_path / "padding", "padding", UNEQUAL, "allreduce")
    line = json.loads((tmp_path / "padding" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0.0 < line["test_accuracy"] < 1.0
    assert line["test_texts"] == line["train_texts"] == 0.5


@pytest.mark.slow
@pytest.mark.world_size(3)
@pytest.mark.parametrize("exchange", ["ring", "reduce_broadcast"])
def test_weights_travel_between_nodes_by_every_sum(tmp_path: Path, exchange: str) -> None:
    between_nodes(tmp_path / "ranks", "class weights", RANKS, exchange)
    between_nodes(tmp_path / "few", "few that count", UNEQUAL, exchange)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_what_does_not_add_up_weights_refuses_them(tmp_path: Path) -> None:
    changes = (*settings("class weights"), "exchange.compression=bf16")
    with pytest.raises(AssertionError, match="returns a weight, which this exchange"):
        train_nodes(tmp_path, UNEQUAL, *changes)
