"""Models that carry state from batch to batch: the weights of a plain loop, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import carried_models
import pytest
from carried_models import COLUMNS, EPOCHS, RATE, plain_loop, step
from node_series import Run, refusal
from runs import base_changes
from safetensors.torch import load_file

import paceline
from paceline import api
from paceline.config import load_config
from paceline.errors import ProofError, UserError
from paceline.plan.candidates import candidate
from paceline.schema import NodePlan, Plan
from paceline.schema.legs import Leg, read_legs

HERE = Path(carried_models.__file__)
ROUNDING = 1e-6
KINDS = ("Reader", "Strict", "Registered", "Unsaved", "Counting")
CARRYING = "carries state from one batch to the next"
PLAIN = {
    "optimizer.name": "sgd",
    "optimizer.learning_rate": RATE,
    "optimizer.momentum": 0.9,
    "optimizer.schedule": "constant",
    "optimizer.warmup": 0.0,
    "data.shuffle": False,
    "train.epochs": EPOCHS,
}
ALONE = (
    (NodePlan(strategy="sequential"), "contiguous"),
    (NodePlan(strategy="threads", threads=1), "contiguous"),
    (NodePlan(strategy="sequential"), "channels_last"),
)
"""Plans that keep a batch in one piece."""


def changes(kind: str, data: str = "whole", **more: Any) -> tuple[str, ...]:
    work = {
        "workload.model": f"{HERE}:{kind}",
        "workload.data": f"{HERE}:{data}",
        "workload.step": f"{HERE}:step",
        "workload.model_options": "{}",
        "workload.batch_size": COLUMNS,
        "data.options": "{}",
    }
    settings = work | PLAIN | {name.replace("__", "."): value for name, value in more.items()}
    return tuple(f"{name}={_toml(value)}" for name, value in settings.items())


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def legs(updates: int, every: int = 5) -> list[Leg]:
    found = []
    for number, first in enumerate(range(0, updates, every)):
        node, layout = ALONE[number % len(ALONE)]
        plan = Plan(nodes=(node,), memory_format=layout, batch_size=COLUMNS)
        name = candidate(node, "fp32", layout).name
        found.append(Leg(name=name, plan=plan, first=first, updates=min(every, updates - first)))
    return found


def check(run: Path, kind: str, data: str) -> None:
    expected, losses = plain_loop(getattr(carried_models, kind), getattr(carried_models, data)())
    found = load_file(run / "checkpoints" / "latest" / "model.safetensors")
    assert found.keys() == expected.keys()
    apart = {name: float((found[name] - expected[name]).abs().max()) for name in found}
    assert max(apart.values()) <= ROUNDING, apart
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["test_loss"] for line in lines] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "data"), [*((kind, "whole") for kind in KINDS), ("Reader", "ragged")]
)
def test_state_goes_on_over_evaluations_and_legs(kind: str, data: str, tmp_path: Path) -> None:
    updates = EPOCHS * (carried_models.BATCHES + (data == "ragged"))
    settings, directory, _ = api.begin(
        load_config(None, (*base_changes(), *changes(kind, data, local__strategy="auto"))),
        run=tmp_path / "run",
    )
    start = api.TrainingStart(config=settings, run=directory, script=legs(updates), silent=True)
    assert api.run_training(start).summary["finished"]
    assert len(read_legs(directory.legs)) == len(legs(updates))
    check(directory.path, kind, data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_where_it_was_left(kind: str, tmp_path: Path) -> None:
    work = paceline.Workload(
        model=getattr(carried_models, kind),
        data=carried_models.whole(),
        step=step,
        batch_size=COLUMNS,
    )
    settings = {**PLAIN, "local.strategy": "sequential"}
    del settings["train.epochs"]
    for epochs in (1, EPOCHS):
        result = paceline.train(
            work, epochs=epochs, run=tmp_path / "run", resume=epochs > 1, settings=settings
        )
    check(result.run, kind, "whole")
    if kind != "Counting":  # a new model has counted nothing
        found = paceline.evaluate(result)
        assert found["loss"] == pytest.approx(result.summary["best_loss"], rel=1e-6)


@pytest.mark.parametrize("kind", ["Reader", "Strict", "Registered", "Unsaved"])
def test_what_divides_batches_refuses_them(kind: str, tmp_path: Path) -> None:
    start = api.begin(
        load_config(
            None,
            (
                *base_changes(),
                *changes(kind, local__strategy="replicas", local__replicas=2),
            ),
        ),
        run=tmp_path / "run",
    )
    with pytest.raises(ProofError, match=CARRYING):
        api.run_training(api.TrainingStart(config=start[0], run=start[1], silent=True))


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["processes", "ddp"])
def test_processes_refuse_them(strategy: str, tmp_path: Path) -> None:
    settings = {**PLAIN, "local.strategy": "processes", "local.processes": 2}
    settings["local.sync"] = "ddp" if strategy == "ddp" else "shared"
    work = paceline.Workload(
        model=carried_models.Reader, data=carried_models.whole(), step=step, batch_size=COLUMNS
    )
    with pytest.raises(UserError, match=CARRYING):
        paceline.train(work, run=tmp_path / "run", settings=settings)


@pytest.mark.slow
@pytest.mark.world_size(3)
@pytest.mark.parametrize("kind", ["allreduce", "parameter_server"])
def test_hosts_refuse_them(kind: str, tmp_path: Path) -> None:
    nodes = [NodePlan(strategy="threads"), NodePlan(strategy="threads")]
    more: dict[str, Any] = {}
    if kind == "parameter_server":
        nodes.append(NodePlan(strategy="threads", share=0.0))
        more["exchange__mode"] = "sync"
    assert CARRYING in refusal(tmp_path, Run(kind, changes("Reader", **more), nodes))
