"""Models that do not tell classes apart: the loss is the yardstick, and no accuracy is shown."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.commands.compare import compare
from paceline.commands.runs import line_of
from paceline.errors import ConfigError
from paceline.observe.tensorboard import EPOCH_TAGS
from paceline.report.load import load_run
from paceline.report.make import make_report

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]
PLAIN = {
    "local.strategy": "threads",
    "local.threads": 1,
    "numerics.precision": "fp32",
    "optimizer.learning_rate": 0.05,
    "train.keep": 1,
}


def regression(outputs: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(80, 3, generator=generator)
    values = points.sum(dim=1, keepdim=True).expand(-1, outputs).contiguous()
    data = TensorDataset(points[:64], values[:64]), TensorDataset(points[64:], values[64:])
    return {"model": lambda: nn.Linear(3, outputs), "data": data, "loss": nn.MSELoss()}


def segmentation() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(80, 1, 6, 6, generator=generator)
    masks = (images[:, 0] > 0).long()
    data = TensorDataset(images[:64], masks[:64]), TensorDataset(images[64:], masks[64:])
    return {"model": lambda: nn.Conv2d(1, 2, 1), "data": data, "loss": nn.CrossEntropyLoss()}


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.table(tokens.long())
        return scores


def language() -> dict[str, Any]:
    tokens = (torch.arange(80 * 9).reshape(80, 9) * 3) % 7
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    data = TensorDataset(inputs[:64], targets[:64]), TensorDataset(inputs[64:], targets[64:])

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.transpose(1, 2), targets)

    return {"model": NextToken, "data": data, "loss": loss}


def counting() -> dict[str, Any]:
    """Integers, one for each sample, that are no classes."""
    points = torch.linspace(0, 1, 80).unsqueeze(1)
    counts = (points[:, 0] * 5).long()
    data = TensorDataset(points[:64], counts[:64]), TensorDataset(points[64:], counts[64:])

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.poisson_nll_loss(outputs[:, 0], targets)

    return {"model": lambda: nn.Linear(1, 1), "data": data, "loss": loss}


def train(run: Path, made: dict[str, Any], *, epochs: int = 3, **settings: Any) -> paceline.Result:
    changes = PLAIN | {key.replace("__", "."): value for key, value in settings.items()}
    work = paceline.Workload(batch_size=16, **made)
    return paceline.train(work, epochs=epochs, settings=changes, run=run, silent=True)


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "make", [regression, lambda: regression(4), segmentation, language, counting]
)
def test_no_accuracy_and_the_best_is_the_lowest_loss(
    make: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    result = train(run, make())
    assert result.accuracy is None
    lines = lines_of(run)
    for key in ("train_accuracy", "test_accuracy", "test_top5"):
        assert all(line[key] is None for line in lines), key
    losses = [line["test_loss"] for line in lines]
    assert losses == sorted(losses, reverse=True), "this training was to improve in every epoch"
    assert result.summary["best_accuracy"] is None
    assert result.summary["best_loss"] == losses[-1]
    best, latest = (run / "checkpoints" / name for name in ("best", "latest"))
    assert best.resolve() == latest.resolve()


def test_a_loss_by_its_name_is_that_of_torch(tmp_path: Path) -> None:
    own = train(tmp_path / "own", regression()).summary["test_loss"]
    named = train(tmp_path / "named", regression() | {"loss": "mse_loss"}).summary["test_loss"]
    assert named == own


def test_a_named_loss_does_not_compare_every_output_with_every_target(tmp_path: Path) -> None:
    points = torch.randn(64, 3)
    made = {"model": lambda: nn.Linear(3, 1), "data": TensorDataset(points, points.sum(dim=1))}
    with pytest.raises(ConfigError, match=r"\[16, 1\] for targets of shape \[16\].*squeeze"):
        train(tmp_path / "run", made | {"loss": "mse_loss"})


def test_the_best_is_not_the_last_and_patience_waits_for_the_loss(tmp_path: Path) -> None:
    made = regression()
    # Trained towards 10 and tested against 3: the loss falls, and rises again beyond 3.
    points = torch.zeros(64, 3)
    data = (
        TensorDataset(points, torch.full((64, 1), 10.0)),
        TensorDataset(points[:16], torch.full((16, 1), 3.0)),
    )
    reached = train(tmp_path / "enough", made, epochs=9, train__until__loss=1e9)
    assert (reached.summary["epochs"], reached.summary["finished"]) == (1, True)
    falls = train(tmp_path / "falls", made, epochs=6, train__until__patience=1)
    assert falls.summary["epochs"] == 6, "patience ended a training whose loss fell"
    rises = train(
        tmp_path / "rises",
        made | {"data": data},
        epochs=9,
        train__until__patience=2,
        optimizer__name="sgd",
        optimizer__learning_rate=0.02,
        optimizer__schedule="constant",
    )
    losses = [line["test_loss"] for line in lines_of(tmp_path / "rises")]
    lowest = losses.index(min(losses))
    assert lowest > 0
    assert rises.summary["best_loss"] == losses[lowest]
    assert rises.summary["epochs"] == lowest + 1 + 2, losses
    best = (tmp_path / "rises" / "checkpoints" / "best").resolve()
    assert best.name == f"step-{4 * (lowest + 1):08d}"
    model = made["model"]()
    model.load_state_dict(load_file(best / "model.safetensors"))
    inputs, values = data[1].tensors
    with torch.no_grad():
        found = float(nn.functional.mse_loss(model(inputs), values))
    assert found == pytest.approx(losses[lowest])


def test_until_accuracy_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    for made in (regression(), segmentation(), language(), counting()):
        with pytest.raises(ConfigError, match=r"train\.until\.accuracy = 0\.9"):
            train(tmp_path / "run", made, train__until__accuracy=0.9)
        assert not (tmp_path / "run").exists(), "a run that never began was kept"


def test_nothing_shows_an_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = regression()
    work = paceline.Workload(batch_size=16, **made)
    settings = PLAIN | {"observe.tensorboard": True}
    paceline.train(work, epochs=2, settings=settings, run=tmp_path / "a")
    said = capsys.readouterr().out
    assert "test loss" in said
    assert "accuracy" not in said
    train(tmp_path / "b", made, optimizer__learning_rate=0.02)
    first, second = load_run(tmp_path / "a"), load_run(tmp_path / "b")
    assert line_of(first)["test_accuracy"] is None
    assert line_of(first)["test_loss"] == pytest.approx(first.metrics[-1]["test_loss"])
    shown = {row["key"] for row in compare(first, second)["measured"]}
    assert {"test_loss", "best_loss"} <= shown
    assert not {"test_accuracy", "best_accuracy"} & shown
    for runs in ([first], [first, second]):
        page = make_report(runs)
        told = [
            page.tiles,
            *((s.title, [_words(block) for block in s.blocks]) for s in page.sections),
        ]
        assert "test loss" in str(told)
        assert "accuracy" not in str(told).lower().replace("train.until.accuracy", "")
    events = b"".join(path.read_bytes() for path in (tmp_path / "a" / "tensorboard").iterdir())
    assert EPOCH_TAGS["test_loss"].encode() in events
    assert b"accuracy" not in events


def _words(block: Any) -> tuple[Any, ...]:
    """Titles of a figure and its series, or of a table and its columns."""
    series = [series.name for series in getattr(block, "series", ())]
    return block.title, series, getattr(block, "columns", ())


def test_a_run_is_continued_with_its_lowest_loss(tmp_path: Path) -> None:
    run, made = tmp_path / "run", regression()
    first = train(run, made, epochs=2, train__checkpoint_every=3)
    state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    assert state["best_loss"] == first.summary["best_loss"]
    assert "NaN" not in json.dumps(state)
    work = paceline.Workload(batch_size=16, **made)
    settings = PLAIN | {"train.checkpoint_every": 3, "train.until.patience": 1}
    again = paceline.train(work, epochs=5, settings=settings, run=run, resume=True, silent=True)
    assert again.summary["epochs"] == 5
    assert [line["test_accuracy"] for line in lines_of(run)] == [None] * 5


OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    points = torch.randn(80, 3, generator=torch.Generator().manual_seed(1))
    values = points.sum(dim=1, keepdim=True)
    return TensorDataset(points[:64], values[:64]), TensorDataset(points[64:], values[64:])

def model():
    return nn.Linear(3, 1)

def loss(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)
"""


@pytest.mark.slow
def test_ranks_agree_that_there_is_no_accuracy(run_cli: RunCli, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    settings = {f"workload.{name}": f"{own}:{name}" for name in ("data", "model", "loss")}
    settings |= {"local.strategy": "processes", "local.processes": "2", "workload.batch_size": "16"}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = run_cli("train", "--run", str(tmp_path / "run"), *sets, "--set", "train.epochs=2")
    assert done.returncode == 0, done.stderr
    assert "test loss" in done.stdout
    assert "accuracy" not in done.stdout
    assert [line["train_accuracy"] for line in lines_of(tmp_path / "run")] == [None, None]
    refused = run_cli(
        "train", "--run", str(tmp_path / "none"), *sets, "--set", "train.until.accuracy=0.9"
    )
    assert refused.returncode == 2, refused.stderr
    assert "train.until.accuracy = 0.9" in refused.stderr
    listed = run_cli("runs", str(tmp_path))
    assert "test loss" in listed.stdout
    assert "accuracy" not in listed.stdout
