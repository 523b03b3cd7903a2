"""`paceline experiment` with steps of its own: real processes, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunCli = Callable[..., Any]
StartCli = Callable[..., Any]

STEPS = """
name = "small"
title = "Small"
study = "Nobody: nothing."
[settings]
"workload.model" = "shallow_cnn"
"workload.data" = "digits"
"train.epochs" = 4
"data.limit" = 256
"local.strategy" = "sequential"
"numerics.memory_format" = "contiguous"
[[step]]
name = "training"
facts = { who = "us" }
[[step]]
name = "listing"
kind = "command"
command = ["paceline", "data", "digits", "--json"]
[[step]]
name = "mistaken"
settings = { "workload.data" = "nothing-of-that-name" }
[[step]]
name = "expected"
fails = true
settings = { "workload.data" = "nothing-of-that-name" }
[[step]]
name = "stranger"
kind = "peer"
peer = "nobody"
"""
FINDINGS = """
from studies.outcome import Claim, Findings
from paceline.report.figure import Section, Table


def findings(outcomes):
    one = outcomes.one(who="us")
    table = Table(key="t", title="T", columns=("accuracy",), rows=((one.number("test_accuracy"),),))
    claim = Claim(claim="It learns.", verdict="holds", because="seen")
    return Findings(sections=(Section(key="s", title="S", blocks=(table,)),), claims=(claim,))
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """An experiment of one's own."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "experiment.toml").write_text(STEPS)
    (folder / "findings.py").write_text(FINDINGS)
    return folder


def wait_for(path: Path, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def epochs_of(out: Path) -> list[int]:
    lines = (out / "steps" / "training" / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["epoch"] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_ended_and_started_again(
    small: Path, tmp_path: Path, start_cli: StartCli, run_cli: RunCli, end: signal.Signals
) -> None:
    (small / "experiment.toml").write_text(STEPS.replace("256", "1400"))  # long enough to be cut
    out = tmp_path / "out"
    words = ("experiment", small, "--out", out, "--only", "training")
    first = start_cli(*words)
    wait_for(out / "steps" / "training" / "run" / "checkpoints" / "latest")
    os.kill(first.pid, end)
    first.wait(timeout=600)
    assert not (out / "steps" / "training" / "step.json").exists()
    second = run_cli(*words, timeout=600)
    assert second.returncode == 0, second.stdout + second.stderr
    step = json.loads((out / "steps" / "training" / "step.json").read_text())
    assert step["resumed"]
    assert step["failed"] == ""
    assert "--resume" in (out / "steps" / "training" / "command.txt").read_text()
    assert epochs_of(out) == [1, 2, 3, 4]
    assert "It learns." in (out / "report.html").read_text()


@pytest.mark.slow
def test_every_kind_of_step_and_of_end(small: Path, tmp_path: Path, run_cli: RunCli) -> None:
    out = tmp_path / "out"
    words = ("experiment", small, "--out", out, "--json")
    done = run_cli(*words, timeout=600)
    assert done.returncode == 1  # two steps failed
    steps = {step["name"]: step for step in json.loads(done.stdout)["steps"]}
    assert steps["training"]["failed"] == ""
    assert steps["training"]["result"]["finished"]
    assert steps["listing"]["result"]["name"] == "digits"
    assert "nothing-of-that-name" in steps["mistaken"]["failed"]
    assert steps["expected"]["failed"] == ""
    assert "nobody.py is not there" in steps["stranger"]["failed"]
    assert "nobody" in steps["stranger"]["failed"]

    again = run_cli(*words, "--only", "training", "--only", "[ls]*", timeout=600)
    assert "training: done before" in again.stderr
    assert "listing: done before" in again.stderr
    assert "stranger: python -m benchmarks.peers.nobody" in again.stderr  # tried again
    look = run_cli("experiment", small, "--out", out, "--look")
    assert look.returncode == 0
    assert "[1/5]" not in look.stdout


def test_two_at_once_are_refused(
    small: Path, tmp_path: Path, start_cli: StartCli, run_cli: RunCli
) -> None:
    out = tmp_path / "out"
    words = ("experiment", small, "--out", out, "--only", "training")
    first = start_cli(*words)
    wait_for(out / "steps" / "training" / "begun.json")
    second = run_cli(*words)
    first.send_signal(signal.SIGTERM)
    first.wait(timeout=600)
    assert second.returncode == 2
    assert "is in use by another experiment" in second.stderr


@pytest.mark.slow
def test_a_long_one_is_predicted_first(small: Path, tmp_path: Path, start_cli: StartCli) -> None:
    text = STEPS.replace('facts = { who = "us" }', 'facts = { who = "us" }\nseconds = 700')
    (small / "experiment.toml").write_text(text)
    out = tmp_path / "out"
    process = start_cli("experiment", small, "--out", out, "--only", "training")
    line = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=600)
    assert "by paceline forecast" in line
    assert json.loads((out / "predicted.json").read_text())["seconds"] > 0


@pytest.mark.lab
def test_lab_hosts_leave_their_counters(tmp_path: Path, run_cli: RunCli) -> None:
    from paceline.lab import probe

    if (obstacle := probe.namespace_obstacle()) is not None:
        pytest.skip(obstacle)
    folder, out = tmp_path / "lab", tmp_path / "out"
    folder.mkdir()
    (folder / "experiment.toml").write_text(
        'name = "lab"\ntitle = "Lab"\n[[step]]\nname = "copy"\nkind = "command"\n'
        'facts = { who = "us" }\nhosts = [0.5, 0.5]\nrate = "1gbit"\n'
        'command = ["paceline", "data", "--json"]\n'
    )
    (folder / "findings.py").write_text(FINDINGS)
    done = run_cli("experiment", folder, "--out", out, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "paceline lab run" in (out / "steps" / "copy" / "command.txt").read_text()
    hosts = json.loads((out / "steps" / "copy" / "step.json").read_text())["hosts"]
    assert set(hosts) == {"a", "b"}
    assert hosts["a"]["bytes_sent"] >= 0
    assert hosts["a"]["cpu_seconds"] > 0


@pytest.mark.slow
def test_stock_ddp_trains_a_configuration(tmp_path: Path) -> None:
    config, result = tmp_path / "config.toml", tmp_path / "result.json"
    config.write_text(
        '[workload]\nmodel = "shallow_cnn"\ndata = "digits"\nbatch_per_worker = 64\n'
        "[optimizer]\nreference_batch = 64\n[train]\nepochs = 2\n[local]\nthreads = 1\n"
    )
    words = ["-m", "benchmarks.peers.ddp", str(config), "--result", str(result)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, *words, "--processes", "2"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert (found["processes"], found["threads"], found["batch_size"]) == (2, 1, 128)
    assert [line["updates"] for line in found["epochs"]] == [12, 12]  # 719 samples for each process
    assert found["test_accuracy"] > 0.3
    assert found["images_per_second"] > 0
    assert found["bytes_sent"] == 0  # no host but this one
