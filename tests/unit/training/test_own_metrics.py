"""Metrics and what is monitored, from Python, with a loss; DataLoaders instead of datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import paceline
from paceline.errors import UserError

POINTS = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
WANTED = POINTS.sum(dim=1, keepdim=True)
DATA = TensorDataset(POINTS, WANTED)


def build() -> nn.Module:
    return nn.Linear(3, 1)


def absolute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs()


METRICS = {
    "mae": absolute,
    "pair": lambda outputs, targets: (absolute(outputs, targets).sum(), len(targets)),
    "mean": lambda outputs, targets: absolute(outputs, targets).mean(),
}


def train(run: Path, strategy: str, data: Any = (DATA, DATA), **more: Any) -> paceline.Result:
    settings = {"local.strategy": strategy, "optimizer.learning_rate": 0.05}
    settings |= {"local.replicas": 3} if strategy == "replicas" else {}
    settings |= more.pop("settings", {})
    options = {"model": build, "loss": nn.MSELoss(), "optimizer": "sgd"}
    if not isinstance(data, DataLoader) and not isinstance(data[0], DataLoader):
        options["batch_size"] = 16
    options |= {key: more.pop(key) for key in list(more) if key in ("metrics", "step", "loss")}
    work = paceline.Workload(data=data, **options)
    return paceline.train(work, epochs=2, run=run, silent=True, settings=settings, **more)


@pytest.mark.parametrize("strategy", ["sequential", "replicas"])
def test_metrics_are_means_over_all_samples_however_they_are_divided(
    tmp_path: Path, strategy: str
) -> None:
    result = train(tmp_path / "run", strategy, metrics=METRICS, monitor="mae:min")
    model = result.model("latest")
    assert not model.training
    with torch.no_grad():
        expected = float(absolute(model(POINTS), WANTED).mean())
    summary = result.summary
    for name in METRICS:
        assert summary[f"test_{name}"] == pytest.approx(expected, rel=1e-5)
        assert summary[f"train_{name}"] > 0
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert summary["best_value"] == min(line["test_mae"] for line in lines)
    assert summary["monitor"] == "mae:min"
    config = (tmp_path / "run" / "config.toml").read_text()
    assert 'monitor = "mae:min"' in config


def test_a_training_ends_when_what_is_monitored_is_good_enough(tmp_path: Path) -> None:
    result = train(
        tmp_path / "run", "sequential", metrics={"mae": absolute}, monitor="mae:min",
        settings={"train.until.value": 100.0},
    )  # fmt: skip
    assert result.summary["epochs"] == 1
    refusal = "names nothing that evaluations report"
    with pytest.raises(UserError, match=refusal):
        train(tmp_path / "wrong", "sequential", monitor="mae:min")


def test_a_data_loader_is_read_as_it_says(tmp_path: Path) -> None:
    loader = DataLoader(DATA, batch_size=15, shuffle=False)
    result = train(tmp_path / "run", "sequential", data=(loader, loader))
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    for name, value in result.model("latest").state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


class Doubtful(torch.utils.data.Dataset[Any]):
    """Draws noise, and may fail."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return len(POINTS)

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise ValueError("torn")
        return POINTS[index] + 0.01 * torch.randn(3), WANTED[index]


def test_processes_of_a_data_loader_read_the_same_samples(tmp_path: Path) -> None:
    weights = []
    for processes in (0, 2):
        loader = DataLoader(Doubtful(), batch_size=15, shuffle=True, num_workers=processes)
        result = train(tmp_path / f"{processes}", "sequential", data=(loader, loader))
        weights.append(result.model("latest").state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    broken = DataLoader(Doubtful(7), batch_size=16, num_workers=2)
    with pytest.raises(UserError, match=r"item 7 raised ValueError: torn; correct the dataset$"):
        train(tmp_path / "broken", "sequential", data=(broken, broken))


def listed(items: list[Any]) -> list[Any]:
    return items


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sampler": ({"sampler": WeightedRandomSampler([1.0] * 50, 50)}, "order of its own"),
    "drop_last": ({"batch_size": 16, "drop_last": True}, r"drop_last\), of which no part can"),
    "collate_fn": ({"collate_fn": listed}, "only a step takes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_data_loader_says_and_we_do_not_do_is_refused(tmp_path: Path, name: str) -> None:
    options, words = REFUSED[name]
    with pytest.raises(UserError, match=words):
        train(tmp_path / "run", "sequential", data=DataLoader(DATA, **options))
    assert not (tmp_path / "run").exists()


def test_two_batch_sizes_are_refused(tmp_path: Path) -> None:
    work = paceline.Workload(model=build, data=DataLoader(DATA, batch_size=7), batch_size=9)
    with pytest.raises(UserError, match="batch_size = 9, but the DataLoader has 7"):
        paceline.train(work, run=tmp_path / "run", silent=True)


def test_a_step_and_a_loss_exclude_each_other(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).mean()

    with pytest.raises(UserError, match="computes the loss itself"):
        train(tmp_path / "run", "sequential", step=step)
    with pytest.raises(UserError, match="let the step return"):
        train(tmp_path / "run", "sequential", step=step, loss="cross_entropy", metrics=METRICS)


def test_what_steps_return_is_checked(tmp_path: Path) -> None:
    answers: dict[str, tuple[Any, str]] = {
        "nothing": (lambda loss: None, "gave a NoneType"),
        "no loss": (lambda loss: {"weight": 1}, "a dict without 'loss'"),
        "weight": (lambda loss: {"loss": loss, "weight": -1}, "gave the weight -1"),
        "text": (lambda loss: {"loss": loss, "weight": "mean"}, "gave the weight 'mean'"),
        "metric": (lambda loss: {"loss": loss, "mae": object()}, "'mae' is to be reported"),
        "detached": (lambda loss: loss.detach(), "no weight has a part in"),
    }
    for name, (answer, words) in answers.items():

        def step(model: nn.Module, batch: Any, answer: Any = answer) -> Any:
            return answer(model(batch[0]).square().mean())

        with pytest.raises(UserError, match=words):
            train(tmp_path / name, "sequential", step=step, loss="cross_entropy")


def test_samples_without_shuffling_come_in_their_order() -> None:
    from paceline.data.sampler import GlobalSampler

    sampler = GlobalSampler(samples=5, batch_size=2, seed=0, shuffle=False)
    assert np.array_equal(sampler.order(3), np.arange(5))
