"""Downpour on emulated hosts: one of four workers loses its power, and another host joins."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab import Lab
from paceline.lab.testing import make_lab

__all__ = ["make_lab"]
pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(280)]
PACELINE = [sys.executable, "-m", "paceline.cli"]
SETTINGS = {
    "workload.data": "digits",
    "workload.batch_size": 64,
    "optimizer.learning_rate": 0.003,
    "train.epochs": 12,
    "local.strategy": "threads",
    "local.threads": 1,
    "exchange.kind": "parameter_server",
    "exchange.mode": "async",
}
# As slow as the file `pace` beside it says, so that a test can act in the middle of training.
MODEL = """
import pathlib, time, torch

HERE = pathlib.Path(__file__).parent

class Paced(torch.nn.Module):
    def __init__(self, channels=1, image_size=8, classes=10):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(channels * image_size**2, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, classes),
        )

    def forward(self, inputs):
        pace = HERE / "pace"
        if self.training and pace.exists():
            time.sleep(float(pace.read_text() or 0))
        return self.layers(inputs)
"""


def wait_for(condition: Callable[[], bool], process: object, log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, log.read_text()  # type: ignore[attr-defined]
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def test_downpour_loses_a_worker_and_takes_another_host(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    lab = make_lab(*({"name": name, "cores": 0.33} for name in "abcdse"), rate="1gbit")
    (tmp_path / "paced.py").write_text(MODEL)
    pace = tmp_path / "pace"
    pace.write_text("0.1")
    run, log = tmp_path / "run", tmp_path / "log"
    settings = SETTINGS | {"workload.model": f"{tmp_path / 'paced.py'}:Paced"}
    words = [word for pair in settings.items() for word in ("--set", f"{pair[0]}={pair[1]}")]
    line = [*PACELINE, "train", "--hosts", "a,b,c,d,s", "--run", str(run), *words]
    join = [*PACELINE, "join", str(run), "--host", "e"]
    with log.open("wb") as output:
        process = lab.start(line, on="a", stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        wait_for(lambda: "epoch 6/12" in log.read_text(), process, log, 150)
        pace.write_text("0.5")
        lab.kill("d")
        wait_for(lambda: "worker 3 on d was lost" in log.read_text(), process, log, 40)
        done = lab.run(join, on="a", capture_output=True, timeout=100)
        assert done.returncode == 0, done.stderr.decode() + log.read_text()
        assert done.stdout == b"host e joins as node 3\n"
        wait_for(lambda: " joined at update " in log.read_text(), process, log, 60)
        pace.unlink()
        code = process.wait(100)
        process.close()
    text = log.read_text()
    assert code == 0, text
    assert "host d (rank 3) has not been heard of for" in text
    assert "worker 3 on d was lost at update" in text
    assert "worker 3 on e joined at update" in text
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["epoch"] == 12
    assert last["test_accuracy"] >= 0.95
    assert not (run / "join.json").exists()
    print(text)  # for docs/parameter-server.md
    late = lab.run(join, capture_output=True)
    assert late.returncode == 2
    assert b"takes no workers now" in late.stderr
