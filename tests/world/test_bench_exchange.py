"""`paceline bench exchange`: real hosts of a lab, all exchanges in turns, one table."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.lab.cluster import TrialRow
from benchmarks.lab.exchange import Cell, Effort

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]
StartCli = Callable[..., "subprocess.Popen[str]"]
ARGUMENTS = [
    *("bench", "exchange", "--model", "mnist_cnn", "--rounds", "1", "--updates", "1", "--json"),
    *("--exchange", "stock DDP", "--exchange", "ring", "--exchange", "parameter_server"),
]
BENCHES = Path(tempfile.gettempdir())
GRADIENT_MB = 690_590 * 4 / 1e6


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.timeout(900)
def test_bytes_of_each_exchange_and_going_on_from_the_file(run_cli: RunCli, tmp_path: Path) -> None:
    words = [*ARGUMENTS, "--out", str(tmp_path / "found.json"), "--rate", "1gbit"]
    done = run_cli(*words, timeout=600)
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)
    assert (cell["model"], cell["hosts"], cell["rate"]) == ("mnist_cnn", 2, "1gbit")
    rows = {row["name"]: row for row in cell["rows"]}
    assert list(rows) == ["stock DDP", "ring", "parameter_server"]
    for row in rows.values():
        assert row["failed"] == ""
        assert row["seconds"] > 0
        # The kernel counts headers too, and what small messages there are.
        assert GRADIENT_MB < row["mb_sent"] < 1.1 * GRADIENT_MB
    # What is there already is not timed again, and can be looked at in part.
    again = run_cli(*words, timeout=600)
    assert json.loads(again.stdout) == [cell]
    assert again.stderr == ""
    (part,) = json.loads(run_cli(*words[:-6], *words[-4:], timeout=600).stdout)
    assert part["rows"] == cell["rows"][:2]


def test_what_failed_or_was_timed_otherwise_is_not_reused() -> None:
    row = TrialRow(
        name="ring", seconds=1.0, low=1.0, high=1.0, images_per_second=1.0, mb_sent=1.0,
        mb_counted=1.0, packets=1.0, waiting=0.0,
    )  # fmt: skip
    wanted = Cell(model="m", hosts=2, cores=(1.0, 1.0), rate="1gbit", effort=Effort())
    cell = replace(wanted, rows=(row,))
    assert cell.answers(wanted, ["ring"])
    assert not cell.answers(wanted, ["ring", "stock DDP"])
    assert not replace(cell, rows=(replace(row, failed="no"),)).answers(wanted, ["ring"])
    assert not cell.answers(replace(wanted, effort=Effort(rounds=5)), ["ring"])
    assert not cell.answers(replace(wanted, rate="100mbit"), ["ring"])


def test_mistakes_are_said(run_cli: RunCli) -> None:
    done = run_cli("bench", "exchange", "--model", "alexnett")
    assert done.returncode == 2
    assert "did you mean 'alexnet'" in done.stderr


@pytest.mark.lab
@pytest.mark.timeout(900)
def test_ended_by_a_signal_it_leaves_nothing(start_cli: StartCli) -> None:
    process = start_cli("bench", "shares", "--cores", "0.5,0.5", "--rounds", "50")
    _until(process, lambda: list(BENCHES.glob("paceline-bench-*/a.log")))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    assert process.returncode == 143
    assert not list(BENCHES.glob("paceline-bench-*"))


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.timeout(900)
def test_a_host_that_is_killed_is_named_with_a_guess_why(start_cli: StartCli) -> None:
    process = start_cli("bench", "shares", "--cores", "0.5,0.5", "--rounds", "50")
    workers = _until(process, lambda: _workers(process.pid))
    workers[-1].kill()
    _, said = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "was killed by SIGKILL; if memory ran out, take fewer hosts" in said
    assert not list(BENCHES.glob("paceline-bench-*"))


def _until(process: subprocess.Popen[str], found: Callable[[], list[Any]]) -> list[Any]:
    end = time.monotonic() + 300
    while not (there := found()):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    return there


def _workers(parent: int) -> list[psutil.Process]:
    """The bench's processes on both hosts; none before both have theirs."""
    there = []
    for each in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "benchmarks.lab.worker" in each.cmdline():
                there.append(each)
    return there if len(there) == 2 else []
