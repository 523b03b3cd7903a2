"""Hosts that join a training under way: as one more worker, and for one that lost its power."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from paced_model import put_into

from paceline.lab import Lab
from paceline.lab.testing import make_lab

__all__ = ["make_lab"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
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


def wait_for(condition: Callable[[], bool], process: object, log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, log.read_text()  # type: ignore[attr-defined]
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def words(folder: Path, **changes: object) -> list[str]:
    """A training's settings, with the model in the folder."""
    settings = SETTINGS | {"workload.model": put_into(folder)}
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    return [word for pair in settings.items() for word in ("--set", f"{pair[0]}={pair[1]}")]


def test_one_more_worker(
    start_cli: Callable[..., subprocess.Popen[str]],
    run_cli: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    pace, run = tmp_path / "pace", tmp_path / "run"
    pace.write_text("0.2")
    line = ["train", "--hosts", "localhost:3", "--engine", "ssh", "--run", str(run)]
    process = start_cli(*line, *words(tmp_path, train__epochs=6))
    metrics, staleness = run / "metrics.jsonl", run / "staleness.json"
    wait_for(metrics.exists, process, metrics, 300)
    pace.write_text("10")  # it must not be over before somebody has joined
    again = run_cli("join", run, "--host", "localhost")
    assert again.returncode == 1
    assert "host localhost takes part already: name another one" in again.stderr
    done = run_cli("join", run, "--host", "127.0.0.1", timeout=600)
    assert (done.returncode, done.stdout) == (0, "host 127.0.0.1 joins as node 3\n"), done.stderr
    wait_for(lambda: "joined at" in staleness.read_text(), process, metrics, 300)
    pace.unlink()
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, output + errors
    assert "worker 3 on 127.0.0.1 joined at update" in output
    assert "going on with 3 workers" in output
    assert len(metrics.read_text().splitlines()) == 6


@pytest.mark.lab
def test_downpour_loses_a_worker_and_takes_another_host(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    lab = make_lab(*({"name": name, "cores": 0.33} for name in "abcdse"), rate="1gbit")
    pace = tmp_path / "pace"
    pace.write_text("0.1")
    run, log = tmp_path / "run", tmp_path / "log"
    line = [*PACELINE, "train", "--hosts", "a,b,c,d,s", "--run", str(run), *words(tmp_path)]
    join = [*PACELINE, "join", str(run), "--host", "e"]
    with log.open("wb") as output:
        process = lab.start(line, on="a", stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        wait_for(lambda: "epoch 6/12" in log.read_text(), process, log, 300)
        pace.write_text("3")  # it must not be over before somebody has joined
        lab.kill("d")
        wait_for(lambda: "worker 3 on d was lost" in log.read_text(), process, log, 300)
        done = lab.run(join, on="a", capture_output=True, timeout=600)
        assert done.returncode == 0, done.stderr.decode() + log.read_text()
        assert done.stdout == b"host e joins as node 3\n"
        wait_for(lambda: " joined at update " in log.read_text(), process, log, 300)
        pace.unlink()
        code = process.wait(300)
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
