"""Hosts that share no files: what they write reaches the launcher, whoever of them dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paced_model import put_into

from paceline.launch.carry import is_used
from paceline.schema.legs import read_legs
from paceline.serve.versions import read_version, version_numbers
from paceline.training.checkpoint import Checkpoints

HERE = Path(__file__).parent
pytestmark = [pytest.mark.timeout(900), pytest.mark.world_size(2)]


class Run:
    """A run of two nodes on this machine, each with files of its own."""

    def __init__(self, folder: Path) -> None:
        self.path, self.cache = folder / "run", folder / "cache"
        self.pace = folder / "pace"
        settings = {
            "workload.model": put_into(folder),
            "workload.data": "synthetic",
            "workload.batch_size": 16,
            "data.options": "{ shape = [1, 8, 8], samples = 64, test_samples = 16 }",
            "local.strategy": "threads",
            "local.threads": 1,
            "exchange.rebalance": "false",
            "train.epochs": 12,
            "train.restarts": 0,
        }
        self.begin = [w for key, value in settings.items() for w in ("--set", f"{key}={value}")]
        self.process: subprocess.Popen[str] | None = None

    def start(self, *words: str) -> subprocess.Popen[str]:
        hosts = ["--hosts", "localhost:2", "--engine", "ssh"]
        self.process = subprocess.Popen(
            [sys.executable, HERE / "private.py", "train", "--run", self.path, *hosts, *words],
            env=os.environ | {"PACELINE_CACHE": str(self.cache)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self.process

    def ends(self) -> tuple[int, str]:
        assert self.process is not None
        output, _ = self.process.communicate(timeout=600)
        return self.process.returncode, output

    def until(self, condition: Callable[[], bool], *, alive: bool = True) -> None:
        end = time.monotonic() + 300
        while not condition():
            assert self.process is not None
            assert not alive or self.process.poll() is None or condition(), self.ends()
            assert time.monotonic() < end, (self.position(), self.epochs(), self.kept())
            time.sleep(0.05)

    def epochs(self) -> list[int]:
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["epoch"] for line in lines]

    def position(self) -> int:
        latest = self.path / "checkpoints" / "latest"
        return int(latest.readlink().name.removeprefix("step-")) if latest.is_symlink() else 0

    def kept(self) -> list[Path]:
        """Folders of agents on the hosts."""
        return sorted((self.cache / "runs").iterdir()) if (self.cache / "runs").exists() else []


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.communicate()


def member_of(node: int, run: Run) -> int:
    """The process that trains a node."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_text().split("\0")
        except OSError:
            continue
        here = any(f"{run.cache}/" in word and f"-{node}-" in word for word in words)
        if here and "paceline.launch.member" in words:
            return int(place.name)
    raise AssertionError(f"node {node} does not train")


@pytest.mark.slow
def test_no_death_costs_what_was_written(run: Run) -> None:
    run.pace.write_text("0.3")
    run.start(*run.begin)
    # It comes while training goes on, not at its end.
    run.until(lambda: run.position() >= 4 and run.epochs() != [])
    # A rank is killed: the hosts that live bring what they have, and keep nothing.
    os.kill(member_of(1, run), signal.SIGKILL)
    code, output = run.ends()
    assert code == 1, output
    assert "was killed by SIGKILL" in output
    before = run.position()
    assert before >= 4
    assert run.epochs() == list(range(1, before // 4 + 1))
    assert run.kept() == []
    check_checkpoint(run)

    # The launcher is killed: the first node's files stay where they are, and their run is known.
    run.start("--resume")
    run.until(lambda: run.position() > before)
    assert run.process is not None
    run.process.kill()
    run.ends()
    run.until(lambda: len(run.kept()) == 1 and not is_used(run.kept()[0]), alive=False)
    (folder,) = run.kept()
    assert "-0-" in folder.name

    # As if nothing had come before it died: the next launcher asks the host.
    shutil.rmtree(run.path / "checkpoints")
    (run.path / "metrics.jsonl").unlink()
    run.pace.unlink()
    run.start("--resume")
    code, output = run.ends()
    assert code == 0, output
    assert "host localhost has kept the checkpoint of update" in output
    assert f"continuing {folder.parent}" in output
    assert run.epochs() == list(range(1, 13))
    assert run.position() == 48
    assert json.loads((run.path / "run.json").read_text())["finished"]
    assert run.kept() == []
    check_checkpoint(run)

    # Without a checkpoint anywhere nothing begins again behind the user's back.
    shutil.rmtree(run.path / "checkpoints")
    run.start("--resume")
    code, output = run.ends()
    assert code == 2, output
    assert "has no checkpoint to continue from" in output
    assert run.epochs() == list(range(1, 13))


@pytest.mark.slow
def test_the_best_is_published_once_by_the_launcher(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    to = tmp_path / "models" / "paced"
    run.start(*run.begin, "--set", "train.epochs=3", "--publish", str(to))
    code, output = run.ends()
    assert code == 0, output
    numbers = version_numbers(to)
    assert [f"published {to / str(n)} " in output for n in numbers] == [True] * len(numbers)
    assert output.count("published ") == len(numbers) > 0
    updates = [read_version(to / str(number)).origin.update for number in numbers]
    assert len(set(updates)) == len(updates)
    best = (run.path / "checkpoints" / "best").readlink().name
    assert updates[-1] == int(best.removeprefix("step-"))
    newest = read_version(to / str(numbers[-1]))
    summary = json.loads((run.path / "run.json").read_text())
    assert newest.origin.metrics["test_accuracy"] == summary["best_accuracy"]


def check_checkpoint(run: Run) -> None:
    """What came can be read, whole."""
    newest = Checkpoints(run.path / "checkpoints", 1).newest()
    assert newest is not None
    state, model, _ = Checkpoints(run.path / "checkpoints", 1).load(newest)
    assert state.position.update == run.position()
    assert model
    leftovers: list[Any] = list(run.path.rglob(".partial-*"))
    assert leftovers == []


@pytest.mark.slow
def test_a_training_in_legs_is_stopped_and_resumed(run: Run) -> None:
    """Nothing is named: the first node leads in legs, and brings what it writes of them."""
    fixed = ("--set", "local.", "exchange.", "train.epochs")
    pairs = [word for word in run.begin if not word.startswith(fixed)] + ["train.epochs=100"]
    run.pace.write_text("0.1")
    process = run.start(*(word for pair in pairs for word in ("--set", pair)))
    run.until(lambda: run.epochs() != [])
    process.send_signal(signal.SIGINT)
    code, output = run.ends()
    assert code == 130, output
    before = run.position()
    assert 0 < before < 400
    legs = read_legs(run.path / "legs.jsonl")
    assert sum(leg.updates for leg in legs) == before
    run.pace.write_text("0")
    run.start("--resume")
    code, output = run.ends()
    assert code == 0, output
    assert run.epochs() == list(range(1, 101))
    assert sum(leg.updates for leg in read_legs(run.path / "legs.jsonl")) == 400
    assert json.loads((run.path / "run.json").read_text())["finished"]
    assert run.kept() == []
