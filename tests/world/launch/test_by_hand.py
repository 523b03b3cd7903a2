"""`mpiexec -n 2 paceline train`, torchrun and srun by hand give the weights of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from paceline.schema.legs import read_legs

BIN = Path(sys.executable).parent
SETTINGS = [
    "workload.model=shallow_cnn",
    "workload.data=synthetic",
    "workload.batch_size=32",
    "data.options={ shape = [1, 28, 28], samples = 160, test_samples = 32 }",
    "train.epochs=1",
    "optimizer.name=sgd",  # Adam divides rounding by itself
    "optimizer.learning_rate=0.05",
    "exchange.rebalance=false",
]
ONE_THREAD = ("local.strategy=threads", "local.threads=1")
LAUNCHERS = {
    "mpiexec": ["mpiexec", "--bind-to", "none", "--oversubscribe", "-n", "2", "python", "-m"],
    "torchrun": ["torchrun", "--nproc-per-node", "2", "-m", "--"],
}


def train(launcher: list[str], run: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = [word for pair in (*SETTINGS, *changes) for word in ("--set", pair)]
    return subprocess.run(
        [*launcher, "paceline.cli", "train", *words, "--run", str(run)],
        env=os.environ | root | {"PATH": f"{BIN}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training in one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    done = train([sys.executable, "-m"], run, *ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("mpiexec", "mpi4py", marks=pytest.mark.mpi),
        pytest.param("torchrun", "gloo", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(name: str, backend: str, alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = train(LAUNCHERS[name], run, *ONE_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"2 nodes, over {backend}") == 1
    assert len(json.loads((run / "plan.json").read_text())["nodes"]) == 2
    expected = load_file(alone / "checkpoints" / "latest" / "model.safetensors")
    found = load_file(run / "checkpoints" / "latest" / "model.safetensors")
    for key, value in expected.items():
        assert abs(value - found[key]).max() < 1e-5, key
    assert not (run / ".launch").exists()


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", [pytest.param("mpiexec", marks=pytest.mark.mpi), "torchrun"])
def test_two_processes_train_in_legs(name: str, alone: Path, tmp_path: Path) -> None:
    """Nothing is named: the first process leads, and the weights are those of one process."""
    run = tmp_path / "run"
    done = train(LAUNCHERS[name], run)
    assert done.returncode == 0, done.stdout + done.stderr
    legs = read_legs(run / "legs.jsonl")
    assert sum(leg.updates for leg in legs) == 5
    assert legs[0].began == "starts at once"
    expected = load_file(alone / "checkpoints" / "latest" / "model.safetensors")
    found = load_file(run / "checkpoints" / "latest" / "model.safetensors")
    for key, value in expected.items():
        assert abs(value - found[key]).max() < 1e-5, key


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_mistake_is_said_once(tmp_path: Path) -> None:
    done = train(LAUNCHERS["torchrun"], tmp_path / "run", "train.epochs=0")
    assert done.returncode != 0
    assert done.stderr.count("paceline: train.epochs = 0 is too small") == 1
