"""The ledger's seconds beside those that each rank's process took, seen from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from outside import Lives

from paceline.lab import Lab
from paceline.lab.testing import make_lab
from paceline.observe.ledger import ledger_of

__all__ = ["make_lab"]
SETTINGS = {
    "workload.model": "shallow_cnn",
    "workload.data": "synthetic",
    "workload.batch_size": 32,
    "data.options": "{ shape = [1, 28, 28], samples = 320, test_samples = 32 }",
    "local.threads": 1,
}
BEGINNING = 0.05
"""Seconds by which two may read another beginning of a process: the kernel counts it in ticks."""


def words(run: Path, **changes: object) -> list[str]:
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    pairs = [word for pair in settings.items() for word in ("--set", f"{pair[0]}={pair[1]}")]
    return ["train", "--run", str(run), *pairs]


def check(run: Path, lives: Lives, ranks: int) -> None:
    """Every second from a process's start to the last line it wrote is booked, and none twice."""
    found = ledger_of(run).ranks
    assert [rank.rank for rank in found] == sorted(lives.by_rank) == list(range(ranks))
    for rank in found:
        began = lives.by_rank[rank.rank].began_at
        events = run / f"rank-{rank.rank}" / "events.jsonl"
        last = json.loads(events.read_text().splitlines()[-1])
        assert last["event"] == "end"
        assert sum(rank.seconds.values()) == pytest.approx(rank.wall)
        assert rank.wall == pytest.approx(last["time"] - began, abs=BEGINNING), rank


def test_two_ranks_of_one_machine(
    run_cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with Lives("paceline.launch.rank", run, "PACELINE_RANK") as lives:
        done = run_cli(
            *words(run, train__epochs=2, local__strategy="processes", local__processes=2),
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    check(run, lives, 2)


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.timeout(900)
def test_four_hosts(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    lab = make_lab(*({"name": name, "cores": 0.5} for name in "abcd"), rate="1gbit")
    run = tmp_path / "run"
    line = [sys.executable, "-m", "paceline.cli", *words(run, train__epochs=60)]
    with Lives("paceline.launch.member", run, "PACELINE_NODE") as lives:
        done = lab.run([*line, "--hosts", "lab", "--engine", "ssh", "--set",
                        "local.strategy=threads"], capture_output=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    check(run, lives, 4)
    for rank in ledger_of(run).ranks:
        assert rank.exchange.updates == 600
        assert rank.exchange.bytes_sent > 0
