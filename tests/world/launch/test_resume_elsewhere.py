"""A run goes on on any number of hosts, with any strategy, and its weights stay one process's."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SETTINGS = (
    "workload.model=mnist_cnn", "workload.data=synthetic", "workload.batch_size=24",
    "workload.model_options.dropout=0.0",
    "data.options.shape=[1, 28, 28]", "data.options.samples=96", "data.options.test_samples=20",
    "optimizer.name=sgd", "optimizer.learning_rate=0.01", "optimizer.schedule=constant",
    "optimizer.warmup=0.0",
)  # fmt: skip


def paceline(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline.cli", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip


def sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "latest" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.world_size(3)
@pytest.mark.parametrize("strategy", ["threads", "auto"])
def test_two_nodes_then_three_then_this_machine(strategy: str, tmp_path: Path) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone"
    own = sets(*SETTINGS, f"local.strategy={strategy}", "train.epochs=1")
    go_on = ("train", "--resume", "--run", str(run))
    steps = [
        ("train", "--run", str(run), "--hosts", "localhost:2", "--engine", "ssh", *own),
        (*go_on, "--hosts", "localhost:3", "--engine", "ssh", *sets("train.epochs=2")),
        (*go_on, *sets("train.epochs=3")),
    ]
    for step in steps:
        made = paceline(*step)
        assert made.returncode == 0, made.stdout
    whole = sets(*SETTINGS, "local.strategy=threads", "train.epochs=3")
    made = paceline("train", "--run", str(alone), *whole)
    assert made.returncode == 0, made.stdout
    one, other = weights(run), weights(alone)
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_what_is_printed_is_accepted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = sets(*SETTINGS, "local.strategy=threads", "train.epochs=100000")
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", "train", "--run", str(run), "--hosts",
         "localhost:2", "--engine", "ssh", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 300
        while not (run / "checkpoints" / "latest").exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=300)[0]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, output
    printed = output.partition("continue with: ")[2].splitlines()[0]
    assert "--hosts localhost:2 --engine ssh" in printed
    epochs = len((run / "metrics.jsonl").read_text().splitlines()) + 1
    made = paceline(*shlex.split(printed)[1:], *sets(f"train.epochs={epochs}"))
    assert made.returncode == 0, made.stdout
