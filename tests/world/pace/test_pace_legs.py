"""Legs of own loops: ranks that stand by and come back, against a plain loop in one process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_own_loop import BESIDE, SCRIPT, TOLERANCE, difference, needs_mpi, plainly, start

from paceline.schema.legs import read_legs

ODD = SCRIPT.with_name("odd_loop.py")
Cli = Callable[..., "subprocess.CompletedProcess[str]"]
KINDS = ("samples", "ignored", "sum", "norm", "gan", "shuffled", "own_parameter", "drawn")
REST = tuple(kind for kind in KINDS if kind not in ("norm", "gan"))
pytestmark = [pytest.mark.timeout(900), pytest.mark.world_size(2)]


def test_alone_there_is_nobody_to_wait(tmp_path: Path) -> None:
    expected = plainly(tmp_path, "shuffled")
    start(tmp_path, sys.executable, SCRIPT, "shuffled", "out.pt", "--switch", "2")
    assert difference(expected, tmp_path / "out.pt") == 0.0


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("kinds", "ranks"),
    [
        (("norm", "gan"), 2),
        *(pytest.param(kinds, ranks, marks=pytest.mark.slow)
          for kinds, ranks in ((REST, 2), (KINDS, 4))),
    ],
)  # fmt: skip
def test_weights_are_those_of_one_process(
    run_cli: Cli, tmp_path: Path, kinds: tuple[str, ...], ranks: int
) -> None:
    every = ",".join(kinds)
    expected = plainly(tmp_path, every)
    words = (SCRIPT, every, "out.pt", "--switch", "3", "--run", "mine")
    done = run_cli("run", "--nproc", str(ranks), *words)
    assert done.returncode == 0, done.stderr
    assert difference(expected, tmp_path / "out.pt") < TOLERANCE
    for kind in kinds:
        run = tmp_path / "mine" / kind
        legs = read_legs(run / "legs.jsonl")
        names = {leg.name for leg in legs}
        assert {"rank 0 alone", f"all {ranks} ranks"} <= names
        assert sum(leg.updates for leg in legs) == (12 if kind == "drawn" else 15)
    assert run_cli("report", run).returncode == 0
    assert "rank 0 alone" in (run / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.world_size(4)
@pytest.mark.parametrize(("ranks", "kinds"), [(1, ("norm", "sum")), (2, ("gan", "shuffled"))])
def test_hosts_stand_by_and_come_back(
    run_cli: Cli, tmp_path: Path, ranks: int, kinds: tuple[str, ...]
) -> None:
    """Two hosts, which here are one machine by two names."""
    expected = plainly(tmp_path, ",".join(kinds))
    words = (SCRIPT, ",".join(kinds), "out.pt", "--switch", "3", "--run", "mine")
    done = run_cli("run", "--nproc", str(ranks), "--hosts", "localhost,127.0.0.1", *words)
    assert done.returncode == 0, done.stderr
    assert difference(expected, tmp_path / "out.pt") < TOLERANCE
    teams = {"rank 0 alone", f"all {2 * ranks} ranks"} | ({"ranks 0 and 1"} if ranks > 1 else set())
    for kind in kinds:
        legs = read_legs(tmp_path / "mine" / kind / "legs.jsonl")
        assert teams <= {leg.name for leg in legs}
        assert sum(leg.updates for leg in legs) == 15


def test_a_run_that_stopped_goes_on(run_cli: Cli, tmp_path: Path) -> None:
    expected = plainly(tmp_path, "norm", "--epochs", "4")
    for words in (("--stop", "2"), ()):
        options = ("--epochs", "4", "--run", "mine", "--switch", "3", *words)
        done = run_cli("run", "--nproc", "2", SCRIPT, "norm", "out.pt", *options)
        assert done.returncode == 0, done.stderr
    assert difference(expected, tmp_path / "out.pt") < TOLERANCE
    assert sum(leg.updates for leg in read_legs(tmp_path / "mine" / "legs.jsonl")) == 20


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_over_mpi(tmp_path: Path, ranks: int) -> None:
    expected = plainly(tmp_path, "norm,gan")
    start(
        tmp_path, BESIDE / "mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", ranks,
        sys.executable, SCRIPT, "norm,gan", "out.pt", "--switch", "3",
    )  # fmt: skip
    assert difference(expected, tmp_path / "out.pt") < TOLERANCE


@pytest.mark.slow
def test_the_pilot_tries_the_first_rank_alone(run_cli: Cli, tmp_path: Path) -> None:
    """Tiny updates between two ranks are mostly waiting: which is faster is not asserted."""
    expected = plainly(tmp_path, "samples", "--epochs", "80")
    words = ("samples", "out.pt", "--legs", "--epochs", "80", "--run", "mine")
    done = run_cli("run", "--nproc", "2", SCRIPT, *words)
    assert done.returncode == 0, done.stderr
    assert difference(expected, tmp_path / "out.pt") < 1e-4
    legs = read_legs(tmp_path / "mine" / "legs.jsonl")
    assert legs[0].name == "all 2 ranks"
    assert "rank 0 alone" in {leg.name for leg in legs if leg.role == "trial"}
    # A trial that is kept goes on as the same leg; one that the training ends with is not told.
    told = re.findall(r"paceline: (.*) from now on", done.stdout)
    assert set(told) <= {leg.name for leg in legs}


@pytest.mark.parametrize(
    "kind", ["counted", *(pytest.param(k, marks=pytest.mark.slow) for k in ("left by number",))]
)
def test_loops_that_count_are_refused(run_cli: Cli, kind: str) -> None:
    done = run_cli("run", "--nproc", "2", ODD, kind)
    assert done.returncode != 0
    assert "did otherwise with its batches than the first rank" in done.stderr


def test_parts_of_ones_own_are_refused(run_cli: Cli) -> None:
    done = run_cli("run", "--nproc", "2", ODD, "part")
    assert done.returncode != 0
    assert "use Pace(legs=False)" in done.stderr


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("carried", "the loop gives a model what came of an earlier batch"),
        ("kept", "a model holds tensors that are others on every rank"),
        pytest.param("nested", "a loader is used inside the loop", marks=pytest.mark.slow),
        pytest.param("left together", "", marks=pytest.mark.slow),
    ],
)
def test_no_rank_stands_by_where_it_would_miss_something(
    run_cli: Cli, kind: str, reason: str
) -> None:
    done = run_cli("run", "--nproc", "2", ODD, kind)
    assert done.returncode == 0, done.stderr
    assert ("no legs" in done.stdout) == bool(reason)
    assert reason in done.stdout
    assert "seen 192" in done.stdout
    weights = {line.partition("weights ")[2] for line in done.stdout.splitlines()} - {""}
    assert len(weights) == 1
