"""A run that is continued is the run that was begun: longer, damaged, or edited meanwhile."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainings import PacedTraining, Training

from paceline.config import load_config

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]

EXACT = ("epoch", "train_accuracy", "test_loss", "test_accuracy")
CONSTANT = {"optimizer__schedule": "constant", "optimizer__warmup": 0.0}
MODELS = Path(__file__).parent.parent / "parity" / "typed_models.py"
OPTIMIZER = """
import torch


class Own(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "k": 0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                self.state[p]["n"] = self.state[p].get("n", 0) + 1
                p.sub_(p.grad * group["lr"] * (group["k"] + self.count) / self.state[p]["n"])
"""


@pytest.fixture
def run(call_cli: RunCli) -> Callable[..., str]:
    """Runs a command that must succeed; its output."""

    def call(*arguments: str) -> str:
        done = call_cli(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


def refused(call_cli: RunCli, *arguments: str) -> str:
    done = call_cli(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


def steady(place: Path, **changes: Any) -> PacedTraining:
    """A training whose rates do not follow its length."""
    place.parent.mkdir(exist_ok=True)
    return PacedTraining(place, **CONSTANT, **changes)


@pytest.mark.parametrize("own", [False, True], ids=["adam", "own optimizer"])
def test_longer_from_the_middle_of_an_epoch(
    own: bool, tmp_path: Path, run: Callable[..., str]
) -> None:
    """Ten updates make an epoch: 13 end in the second, 27 in the third."""
    changes: dict[str, Any] = {"train__evaluate_every": 2, "train__steps": 13}
    if own:
        (tmp_path / "own.py").write_text(OPTIMIZER)
        changes["optimizer__name"] = f"{tmp_path / 'own.py'}:Own"
    subject = steady(tmp_path / "run", **changes)
    run(*subject.begin)
    config, lines = subject.run / "config.toml", subject.lines()
    assert [line["epoch"] for line in lines] == [1, 2]
    assert lines[1]["test_accuracy"] is not None  # the last is always evaluated
    assert "nothing left to train" in run(*subject.resume)
    assert subject.lines() == lines
    run(*subject.resume, "--set", "train.steps=27")
    whole = Training(tmp_path / "whole")
    run("train", str(config), "--run", str(whole.run))
    assert subject.weights() == whole.weights()
    for mine, other in zip(subject.lines(), whole.lines(), strict=True):
        assert [mine[key] for key in EXACT] == [other[key] for key in EXACT]
    states = [
        json.loads((s.run / "checkpoints" / "latest" / "state.json").read_text())
        for s in (subject, whole)
    ]
    for key in ("position", "updates", "best_accuracy", "since_best", "optimizer_numbers"):
        assert states[0][key] == states[1][key], key
    assert states[0]["position"] == {"epoch": 2, "step": 7, "update": 27}


def test_longer_where_rates_follow_the_length(
    tmp_path: Path, run: Callable[..., str], call_cli: RunCli
) -> None:
    """It cannot be the run of that length from the start, but config.toml says what it was."""
    subject = PacedTraining(
        tmp_path / "run", train__steps=13, optimizer__schedule="cosine", optimizer__warmup=0.2
    )
    run(*subject.begin)
    said = run(*subject.resume, "--set", "train.steps=20")
    assert "follows the new length from update 13 on, and before that the 13 updates" in said
    run(*subject.resume, "--set", "train.steps=25")
    config = subject.run / "config.toml"
    assert load_config(config).train.lengths == {"13": 13, "20": 20}
    again = Training(tmp_path / "again")
    run("train", str(config), "--run", str(again.run))
    assert subject.weights() == again.weights()
    before = config.read_text()
    said = refused(call_cli, *subject.resume, "--set", "train.steps=18")
    assert "cannot become shorter than it is" in said
    assert config.read_text() == before


def test_an_edited_config_is_refused_by_name(
    tmp_path: Path, run: Callable[..., str], call_cli: RunCli
) -> None:
    subject = steady(tmp_path / "run", train__steps=3)
    run(*subject.begin)
    config = subject.run / "config.toml"
    text = config.read_text()
    assert "batch_size = 16" in text
    config.write_text(text.replace("batch_size = 16", "batch_size = 12"))
    said = refused(call_cli, *subject.resume, "--set", "train.steps=6")
    assert "step-00000003 was trained with other settings" in said
    assert "workload.batch_size (was 16, now 12)" in said
    config.write_text(text.replace("steps = 3", "steps = 6"))  # how long may change, by hand too
    assert "from update 3" in run(*subject.resume)
    assert subject.position() == 6


def test_damaged_files_beside_the_checkpoints_do_not_matter(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    subject = steady(tmp_path / "run", train__steps=13)
    run(*subject.begin)
    plan = subject.run / "plan.json"
    before = json.loads(plan.read_text())
    plan.write_bytes(b"\0" * 4096)
    (subject.run / "metrics.jsonl").write_bytes(b"\xff\0{]\n")
    (subject.run / "run.json").write_text("{")
    said = run(*subject.resume, "--set", "train.steps=20")
    assert "plan.json" in said
    assert "the plan of the newest checkpoint is used" in said
    assert "has lost its lines on 1 of 1 epochs" in said
    assert json.loads(plan.read_text()) == before
    assert json.loads((subject.run / "run.json").read_text())["updates"] == 20
    whole = steady(tmp_path / "other" / "whole", train__steps=20)
    run(*whole.begin)
    assert subject.weights() == whole.weights()


def test_nothing_but_damaged_checkpoints(
    tmp_path: Path, run: Callable[..., str], call_cli: RunCli
) -> None:
    subject = steady(tmp_path / "run", train__steps=3, train__keep=1)
    run(*subject.begin)
    file = subject.run / "checkpoints" / "latest" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    said = refused(call_cli, *subject.resume, "--set", "train.steps=6")
    assert "optimizer.safetensors is not what was written" in said
    assert "there is no other to continue from" in said
    assert "steps = 3" in (subject.run / "config.toml").read_text()


@pytest.mark.parametrize("optimizer", [pytest.param("adam", marks=pytest.mark.slow), "sgd"])
def test_a_parameter_without_a_gradient_yet_goes_on_in_ranks(
    optimizer: str, tmp_path: Path, run: Callable[..., str]
) -> None:
    """From one process to two at the second update; a layer is used from the fourth on."""
    changes: dict[str, Any] = {"optimizer__name": optimizer, "optimizer__weight_decay": 0.1}
    if optimizer == "sgd":
        changes["optimizer__momentum"] = 0.9
    model = {"workload__model": f"{MODELS}:Late"}
    subject = Training(tmp_path / "run", train__steps=2, **model, **changes, **CONSTANT)
    whole = Training(tmp_path / "whole", train__steps=7, **model, **changes, **CONSTANT)
    run(*subject.begin)
    run(*whole.begin)
    ranks = json.loads((subject.run / "plan.json").read_text())
    ranks["nodes"][0] |= {"strategy": "processes", "processes": 2}
    (tmp_path / "plan.json").write_text(json.dumps(ranks))
    run(*subject.resume, "--plan", str(tmp_path / "plan.json"), "--set", "train.steps=5")
    # And once more, from a checkpoint that ranks have written, in one process.
    ranks["nodes"][0] |= {"strategy": "threads", "processes": 1}
    (tmp_path / "plan.json").write_text(json.dumps(ranks))
    run(*subject.resume, "--plan", str(tmp_path / "plan.json"), "--set", "train.steps=7")
    found = [
        load_file(s.run / "checkpoints" / "latest" / name)
        for s in (subject, whole)
        for name in ("model.safetensors", "optimizer.safetensors")
    ]
    for mine, other in zip(found[:2], found[2:], strict=True):
        assert mine.keys() == other.keys()
        for key, tensor in other.items():
            torch.testing.assert_close(mine[key], tensor, rtol=1e-4, atol=1e-5)
    assert not any(key.startswith("never") for key in found[1])
