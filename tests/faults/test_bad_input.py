"""Mistakes of the user: exit code 2, one sentence with the value and the remedy, no traceback.

Most run in this process through the real entry point, because starting one costs more than
the mistake takes to find; the last tests start the real command.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from trainings import SMALL, PacedTraining, Training

from paceline import cli

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]
StartCli = Callable[..., "subprocess.Popen[str]"]

# name: (arguments after `train`, words that the sentence must have)
MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "misspelt section": (["--set", "trian.epochs=3"], ["'trian'", "did you mean 'train'"]),
    "unknown key": (["--set", "train.epoch=3"], ["'train.epoch'", "'train.epochs'"]),
    "wrong type": (["--set", "train.epochs=many"], ["'many'", "a whole number"]),
    "out of range": (["--set", "optimizer.warmup=7"], ["optimizer.warmup = 7", "at most 1"]),
    "negative epochs": (["--set", "train.epochs=-1"], ["train.epochs = -1", "at least 1"]),
    "not a number": (["--set", "optimizer.learning_rate=nan"], ["nan", "finite number"]),
    "momentum with adam": (["--set", "optimizer.momentum=0.9"], ["belong to sgd", "'adam'"]),
    "unknown optimizer": (["--set", "optimizer.name=adma"], ["'adma'", "sgd, adam, adamw"]),
    "unknown strategy": (["--set", "local.strategy=thread"], ["'thread'", "threads"]),
    "option of another strategy": (
        ["--set", "local.stages=2"],
        ["local.stages = 2", "'threads'", "options are: threads"],
    ),
    "option without strategy": (
        ["--set", "local.strategy=auto"],
        ["local.threads = 1", "'auto'"],
    ),
    "bad form of --set": (["--set", "train.epochs"], ["'train.epochs'", "key=value"]),
    "value used as a table": (["--set", "seed.value=1"], ["'seed' is a value"]),
    "name with a slash": (["--set", "name=a/b"], ["'a/b'", "plain word"]),
    "seed too large": (["--set", f"seed={10**30}"], ["seed = 1", "at most"]),
    "missing file": (["nothing.toml"], ["nothing.toml", "TOML file"]),
    "bad TOML": (["bad.toml"], ["bad.toml", "not valid TOML", "line 1"]),
    "not text": (["binary.toml"], ["binary.toml", "cannot be read as text"]),
    "folder without a configuration": (["empty"], ["config.toml", "TOML file"]),
    "both kinds of batch": (["both.toml"], ["batch_size = 8", "batch_per_worker = 4"]),
    "unknown model": (
        ["--set", "workload.model=shallow_cn"],
        ["'shallow_cn'", "did you mean 'shallow_cnn'"],
    ),
    "unknown option of a model": (
        ["--set", "workload.model_options.droput=0.1"],
        ["droput", "shallow_cnn"],
    ),
    "unknown data": (["--set", "workload.data=mnits"], ["'mnits'", "mnist"]),
    "unknown option of the data": (["--set", "data.options.colour=1"], ["colour", "shape"]),
    "data that is not there": (
        ["--set", "workload.data=mnist", "--set", "data.options={}", "--data", "empty"],
        ["mnist", "paceline data get mnist"],
    ),
    "empty folder of images": (["--set", "workload.data=./empty"], ["empty"]),
    "no CUDA": (["--set", "train.device=cuda"], ["'cuda'", "'cpu' or 'auto'"]),
    "missing weights": (
        ["--set", "workload.weights=missing.safetensors"],
        ["missing.safetensors"],
    ),
    "weights of another model": (
        ["--set", "workload.weights=other.safetensors"],
        ["other.safetensors"],
    ),
    "garbled weights": (["--set", "workload.weights=garbled.safetensors"], ["garbled"]),
    "too few classes": (
        ["--set", "workload.classes=3"],
        ["workload.classes = 3", "10 classes", "raise it"],
    ),
    "image too small for the model": (
        ["--set", "workload.model=alexnet", "--set", "data.options.shape=[3, 16, 16]"],
        ["alexnet", "16"],
    ),
    "module that is not there": (
        ["--set", "workload.model=no_such_module:build"],
        ["no_such_module"],
    ),
    "file that is not there": (["--set", "workload.model=own/gone.py:build"], ["gone.py"]),
    "attribute that is not there": (["--set", "workload.model=own.py:biuld"], ["biuld", "build"]),
    "not callable": (["--set", "workload.model=own.py:NUMBER"], ["NUMBER"]),
    "gives no model": (["--set", "workload.model=own.py:build"], ["build", "Module"]),
    "file that does not load": (["--set", "workload.model=broken.py:build"], ["broken.py"]),
    "unknown loss": (["--set", "workload.loss=mse"], ["'mse'", "module:callable"]),
    "run directory that is in use": (["--run", "full"], ["full", "is not empty", "--resume"]),
    "run directory below a file": (["--run", "bad.toml/run"], ["bad.toml/run", "Not a directory"]),
    "resume without a run": (["--resume"], ["runs/latest"]),
    "resume of nothing": (["--resume", "--run", "gone"], ["gone"]),
    "resume of something else": (["--resume", "--run", "empty", "--bare"], ["no config.toml"]),
    "plan that is not there": (["--plan", "gone.json"], ["gone.json", "does not exist"]),
    "plan that is no JSON": (["--plan", "bad.toml"], ["bad.toml", "not valid JSON"]),
    "plan with a wrong key": (["--plan", "plan.json"], ["plan.json", "'nodse'", "'nodes'"]),
    "plan with an unknown strategy": (["--plan", "strategy.json"], ["'magic'", "sequential"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files to make mistakes with."""
    place = tmp_path_factory.mktemp("mistakes")
    for name, text in {
        "bad.toml": "epochs = = 3",
        "both.toml": "[workload]\nbatch_size = 8\nbatch_per_worker = 4\n",
        "own.py": "NUMBER = 3\n\ndef build():\n    return 3\n",
        "broken.py": "import no_such_module_either\n\ndef build():\n    pass\n",
        "plan.json": '{"nodse": []}',
        "strategy.json": '{"nodes": [{"strategy": "magic"}], "batch_size": 16}',
        "garbled.safetensors": "not tensors at all",
    }.items():
        (place / name).write_text(text)
    (place / "binary.toml").write_bytes(b"\xff\xfe\x00\x81")
    (place / "empty").mkdir()
    (place / "full").mkdir()
    (place / "full" / "thesis.txt").write_text("irreplaceable")
    save_file({"other": torch.zeros(3)}, place / "other.safetensors")
    return place


def settings(arguments: list[str]) -> list[str]:
    """The small training of the fault tests, unless the mistake is a file or a bare resume."""
    if "--bare" in arguments or "--resume" in arguments or not arguments[0].startswith("--"):
        return []
    return [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_sentence(
    mistake: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments, words = MISTAKES[mistake]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "empty"))
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", *settings(arguments), *(a for a in arguments if a != "--bare")])
    output, error = capfd.readouterr()
    assert caught.value.code == 2, output + error
    check_sentence(error, words)
    # Nothing is left of the attempt, so that the next one meets no traces of it.
    left = {path.name for path in tmp_path.iterdir()} - before - {"__pycache__"}
    assert not [path for name in left for path in (tmp_path / name).glob("*")], left
    assert (tmp_path / "full" / "thesis.txt").read_text() == "irreplaceable"


def check_sentence(error: str, words: list[str]) -> None:
    assert error.startswith("paceline: "), error
    assert len(error.splitlines()) == 1, error
    assert "Traceback" not in error
    assert "internal error" not in error
    for word in words:
        assert word in error


def test_the_same_through_the_real_command(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("train", "--set", "trian.epochs=3")
    assert (done.returncode, done.stdout) == (2, "")
    check_sentence(done.stderr, ["'trian'", "did you mean 'train'"])
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_that_ranks_find(training: Callable[..., Training], call_cli: RunCli) -> None:
    subject = training("run", local__strategy="processes", local__processes=2, workload__classes=3)
    done = call_cli(*subject.begin)
    assert done.returncode == 2, done.stderr
    check_sentence(done.stderr, ["workload.classes = 3"])
    assert not subject.run.exists()


def test_a_model_that_does_not_fit_the_data(
    training: Callable[..., Training], call_cli: RunCli, tmp_path: Path
) -> None:
    (tmp_path / "narrow.py").write_text(
        "from torch import nn\n\ndef build():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 10))\n"
    )
    narrow = {"workload__model": f"{tmp_path}/narrow.py:build"}
    alone = call_cli(*training("alone", **narrow).begin)
    assert alone.returncode == 1
    check_sentence(alone.stderr, ["mat1 and mat2", "raised by the model", "[16, 1, 28, 28]"])
    ranks = {"local__strategy": "processes", "local__processes": 2}
    several = call_cli(*training("several", **narrow, **ranks).begin)
    assert several.returncode == 1
    assert several.stderr.startswith("paceline: rank ")
    assert "raised by the model or the loss, on inputs of shape [5, 1, 28, 28]" in several.stderr
    # It is not said to be one that cannot be cut.
    stages = {"local__strategy": "pipeline", "local__stages": 2}
    cut = call_cli(*training("cut", **narrow, **stages).begin)
    assert cut.returncode == 1, cut.stderr
    assert "mat1 and mat2" in cut.stderr
    assert "raised by the model or the loss" in cut.stderr


def test_too_high_a_rate_is_said_with_the_update(
    training: Callable[..., Training], call_cli: RunCli
) -> None:
    subject = training(
        "run",
        optimizer__name="sgd",
        optimizer__learning_rate=1e9,
        optimizer__warmup=0,
        optimizer__schedule="constant",
    )
    done = call_cli(*subject.begin)
    assert done.returncode == 1
    check_sentence(done.stderr, ["at update 2 (epoch 1, learning rate 1e+09)", "clip_norm"])
    assert "there is no checkpoint yet" in done.stderr


def test_life_of_a_run(
    training: Callable[..., Training], call_cli: RunCli, start_cli: StartCli, tmp_path: Path
) -> None:
    """In use, killed, finished, repeated, continued otherwise, damaged."""
    subject = PacedTraining(
        tmp_path / "run",
        pace=300.0,
        train__epochs=2,
        local__threads=2,
        optimizer__schedule="constant",
        optimizer__warmup=0.0,
    )
    process = start_cli(*subject.begin)
    subject.wait_for(subject.asleep.exists, process)
    busy = call_cli(*subject.resume)
    process.kill()  # the sleeping update would take five minutes
    process.communicate(timeout=600)
    subject.set_pace(None)
    assert busy.returncode == 2
    check_sentence(busy.stderr, ["run is in use by another training", "choose another --run"])
    # Killed before its first checkpoint: there is nothing to go on from, which is said.
    nothing = call_cli(*subject.resume)
    assert nothing.returncode == 2
    check_sentence(nothing.stderr, ["run has no checkpoint to continue from", "from the start"])
    # Nothing would be lost: the same command begins it again, in the same place.
    begun = call_cli(*subject.begin)
    assert begun.returncode == 0, begun.stderr
    before, weights = (subject.run / "metrics.jsonl").read_text(), subject.weights()

    finished = call_cli(*subject.resume)
    assert finished.returncode == 0, finished.stderr
    assert "is finished after 20 updates: there is nothing left to train" in finished.stdout
    assert (subject.run / "metrics.jsonl").read_text() == before
    assert subject.weights() == weights

    again = training("again")
    repeated = call_cli("train", str(subject.run / "config.toml"), "--run", str(again.run))
    assert repeated.returncode == 0, repeated.stderr
    assert again.weights() == weights
    plans = [json.loads((s.run / "plan.json").read_text()) for s in (subject, again)]
    assert plans[0] == plans[1]

    other = call_cli(*subject.resume, "--set", "workload.batch_size=9")
    assert other.returncode == 2
    check_sentence(
        other.stderr,
        ["another configuration (workload.batch_size (was 16, now 9))", "leave CONFIG"],
    )

    longer = call_cli(*subject.resume, "--set", "train.epochs=3")
    assert longer.returncode == 0, longer.stderr
    at_once = training("at_once")
    whole = call_cli(
        *("train", str(subject.run / "config.toml"), "--run", str(at_once.run)),
        *("--plan", str(subject.run / "plan.json")),
    )
    assert whole.returncode == 0, whole.stderr
    assert len((subject.run / "metrics.jsonl").read_text().splitlines()) == 3
    weights = subject.weights()
    assert weights == at_once.weights()

    newest = subject.run / "checkpoints" / "latest" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:1000])
    repaired = call_cli(*subject.resume)
    assert repaired.returncode == 0, repaired.stderr
    assert "step-00000030 is damaged (model.safetensors is not what was written)" in repaired.stdout
    assert "from update 27" in repaired.stdout
    assert subject.weights() == weights


def test_other_settings_do_not_get_the_plan_of_the_run(
    training: Callable[..., Training], call_cli: RunCli
) -> None:
    subject, other = training("run", train__steps=1), training("other")
    assert call_cli(*subject.begin).returncode == 0
    config = str(subject.run / "config.toml")
    done = call_cli("train", config, "--run", str(other.run), "--set", "workload.batch_size=8")
    assert done.returncode == 0, done.stderr
    assert json.loads((other.run / "plan.json").read_text())["batch_size"] == 8
    state = json.loads((other.run / "checkpoints" / "latest" / "state.json").read_text())
    assert state["batch_size"] == 8


@pytest.mark.parametrize("strategy", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_reader_of_the_output_that_leaves(
    strategy: str, training: Callable[..., Training], start_cli: StartCli, call_cli: RunCli
) -> None:
    extra = {"local__processes": 2} if strategy == "processes" else {}
    subject = training("run", local__strategy=strategy, **extra)
    process = start_cli(*subject.begin)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("epoch 1/4")
    process.stdout.close()
    assert process.stderr is not None
    error = process.stderr.read()
    assert process.wait(300) in (0, 1)
    assert error == ""
    done = call_cli(*subject.resume)
    assert done.returncode == 0, done.stderr
    assert [line["epoch"] for line in subject.lines()] == [1, 2, 3, 4]
