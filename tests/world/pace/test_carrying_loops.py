"""Loops of one's own that carry rows over the end of an epoch, where shares would follow speeds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_own_loop import SCRIPT, TOLERANCE, difference, start

CARRYING = SCRIPT.with_name("carrying_loop.py")
GIVEN = "the loop gives a model what came of an earlier batch"
Cli = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = [pytest.mark.timeout(900), pytest.mark.world_size(3)]


def trained(run_cli: Cli, folder: Path, kind: str) -> subprocess.CompletedProcess[str]:
    start(folder, sys.executable, CARRYING, kind, "plain.pt", "--plain")
    return run_cli("run", "--nproc", "3", CARRYING, kind, "out.pt")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("copied", GIVEN),
        ("kept", "a model holds tensors that are others on every rank"),
        *(pytest.param(kind, reason, marks=pytest.mark.slow)
          for kind, reason in (("given", GIVEN), ("inner", GIVEN), ("once", GIVEN),
                               ("part", "pace.part has given"))),
    ],
)  # fmt: skip
def test_ranks_keep_their_rows(run_cli: Cli, tmp_path: Path, kind: str, reason: str) -> None:
    done = trained(run_cli, tmp_path, kind)
    assert done.returncode == 0, done.stderr
    assert f"shares stay as they are: {reason}" in done.stdout
    plain, found = tmp_path / "plain.pt", tmp_path / "out.pt"
    assert difference(torch.load(plain), found) < TOLERANCE
    lines = [json.loads(line) for line in (tmp_path / "mine" / "metrics.jsonl").open()]
    assert {tuple(line["shares"]) for line in lines} == {(0.3333, 0.3333, 0.3333)}


@pytest.mark.slow
def test_without_any_shares_follow(run_cli: Cli, tmp_path: Path) -> None:
    done = trained(run_cli, tmp_path, "none")
    assert done.returncode == 0, done.stderr
    assert "shares stay" not in done.stdout
    assert difference(torch.load(tmp_path / "plain.pt"), tmp_path / "out.pt") < TOLERANCE
    lines = [json.loads(line) for line in (tmp_path / "mine" / "metrics.jsonl").open()]
    assert lines[0]["shares"] != lines[-1]["shares"]


@pytest.mark.slow
def test_what_is_seen_when_shares_have_changed_is_refused(run_cli: Cli, tmp_path: Path) -> None:
    done = trained(run_cli, tmp_path, "over")
    assert done.returncode != 0
    assert "what came of a batch before shares changed" in done.stderr
