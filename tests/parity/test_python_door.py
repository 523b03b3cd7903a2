"""`paceline.train` and `paceline.evaluate` from Python, with objects of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import paceline

BATCH, EPOCHS, RATE = 16, 3, 0.5
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "epoch": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "update": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.7, total_steps=40, cycle_momentum=False
    ),
}


def data(seed: int = 0) -> TensorDataset:
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def adadelta(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adadelta(parameters, lr=lr)


def mae(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(dim=1) - targets).abs().float()


def trained(folder: Path, *, settings: dict[str, Any], **parts: Any) -> paceline.Result:
    both = (data(), data(1))
    work = paceline.Workload(**{"model": model, "data": both, "batch_size": BATCH, **parts})
    return paceline.train(
        work,
        epochs=EPOCHS,
        run=folder,
        silent=True,
        settings={"local.strategy": "sequential", "data.shuffle": False, **settings},
    )


def plain(optimizer_of: Callable[..., Any], make: Any = None, every: str = "") -> dict[str, Any]:
    net, (inputs, targets) = model(), data().tensors
    optimizer = optimizer_of(net.parameters())
    scheduler = make(optimizer) if make is not None else None
    for _ in range(EPOCHS):
        for at in range(0, len(inputs), BATCH):
            optimizer.zero_grad()
            part = slice(at, at + BATCH)
            nn.functional.cross_entropy(net(inputs[part]), targets[part]).backward()
            optimizer.step()
            if scheduler is not None and every == "update":
                scheduler.step()
        if scheduler is not None and every == "epoch":
            scheduler.step()
    return net.state_dict()


def difference(result: paceline.Result, wanted: dict[str, Any]) -> float:
    found = result.model("latest").state_dict()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


@pytest.mark.parametrize("every", SCHEDULERS)
def test_schedulers_move_rates_as_in_a_plain_loop(tmp_path: Path, every: str) -> None:
    wanted = plain(sgd, SCHEDULERS[every], every)
    parts = {"optimizer": sgd, "scheduler": SCHEDULERS[every]}
    settings = {"optimizer.scheduler_steps": every}
    assert difference(trained(tmp_path / "one", settings=settings, **parts), wanted) == 0.0
    several = settings | {"local.strategy": "replicas", "local.replicas": 2}
    assert difference(trained(tmp_path / "two", settings=several, **parts), wanted) < 1e-6


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "node",
    [
        {"local.strategy": "processes", "local.processes": 2, "local.sync": "shared"},
        {"local.strategy": "pipeline", "local.stages": 2},
    ],
    ids=["processes", "pipeline"],
)
def test_an_own_optimizer_that_treats_every_number_by_itself_goes_with_pieces(
    tmp_path: Path, node: dict[str, Any]
) -> None:
    wanted = plain(lambda parameters: adadelta(parameters, lr=0.3))
    result = trained(
        tmp_path / "run", settings={"optimizer.learning_rate": 0.3, **node}, optimizer=adadelta
    )
    assert difference(result, wanted) < 1e-5


def test_evaluate_is_what_the_training_found(tmp_path: Path) -> None:
    result = trained(tmp_path / "run", settings={}, metrics={"mae": mae})
    found = paceline.evaluate(result, weights="latest")
    assert found["samples"] == 64
    assert found["loss"] == pytest.approx(result.summary["test_loss"], abs=1e-6)
    assert found["accuracy"] == result.accuracy
    assert found["mae"] == pytest.approx(1 - found["accuracy"])
    other = paceline.evaluate(result, data=data())
    assert other["loss"] != found["loss"]
    with pytest.raises(paceline.UserError, match="came as an object of a Python program"):
        paceline.evaluate(result.run)


def test_what_has_no_effect_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paceline.train(
        paceline.Workload(model=model, data=(data(), data()), optimizer=sgd),
        epochs=1,
        run=tmp_path / "run",
        settings={"local.strategy": "sequential", "optimizer.learning_rate": 0.25},
    )
    assert "optimizer.learning_rate = 0.25 has no effect" in capsys.readouterr().out


def test_objects_do_not_go_to_other_hosts(tmp_path: Path) -> None:
    with pytest.raises(paceline.UserError, match="other hosts cannot get the"):
        paceline.train(
            paceline.Workload(model=lambda: model(), data=(data(), data())),
            hosts="a,b",
            run=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def broken(net: nn.Module, batch: Any) -> torch.Tensor:
    raise ValueError("a mistake of one's own")


def test_an_error_of_a_step_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a mistake of one's own") as raised:
        trained(tmp_path / "run", settings={}, step=broken)
    (note,) = raised.value.__notes__
    assert "raised by the step" in note
    assert "broken" in note
    assert not (tmp_path / "run").exists()  # in which nothing was trained


def interrupted(net: nn.Module, batch: Any) -> torch.Tensor:
    raise KeyboardInterrupt


def test_an_interrupt_before_the_first_update_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", settings={}, step=interrupted)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_hosts_train_what_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = paceline.train(
        paceline.Workload(model="mnist_cnn", data="digits", batch_size=64),
        epochs=1,
        run=tmp_path / "run",
        silent=True,
        hosts="localhost:2",
        settings={"data.limit": 128, "exchange.kind": "allreduce", "local.strategy": "threads"},
    )
    assert result.exit_code == 0
    assert result.summary["epochs"] == 1
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert len(plan["nodes"]) == 2
    assert paceline.evaluate(result.run)["samples"] == 128
