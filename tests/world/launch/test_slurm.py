"""`paceline train` on a real Slurm of two nodes that the test starts."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from slurm_cluster import LOGIN, NODES, SlurmCluster, obstacle

from benchmarks.lab.faults import SETTINGS as SLEEPING
from paceline.lab import Lab
from paceline.lab.testing import make_lab  # noqa: F401

pytestmark = [pytest.mark.slurm, pytest.mark.lab]
SETTINGS = [
    "workload.model=shallow_cnn",
    "workload.data=synthetic",
    "workload.batch_size=32",
    "data.options={ shape = [1, 28, 28], samples = 160, test_samples = 32 }",
    "train.epochs=1",
    "local.strategy=threads",
    "local.threads=1",
    "exchange.rebalance=false",
]
PYTHON = [sys.executable, "-m", "paceline.cli"]


@pytest.fixture
def cluster(make_lab: Callable[..., Lab]) -> Iterator[SlurmCluster]:  # noqa: F811
    reason = obstacle()
    if reason is not None:
        pytest.skip(f"no Slurm on this machine: {reason}")
    lab = make_lab(LOGIN, *NODES, rate="1gbit")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        found = SlurmCluster(Path(folder), lab)
        try:
            found.start()
            yield found
        finally:
            found.close()


def arguments(run: Path, *more: str) -> list[str]:
    words = [word for pair in SETTINGS for word in ("--set", pair)]
    return ["train", "--run", str(run), *words, *more]


def check(run: Path, output: str) -> None:
    """It was trained to its end, with one node of the plan on each of Slurm's."""
    assert (run / "run.json").exists(), output
    assert json.loads((run / "run.json").read_text())["finished"], output
    nodes = json.loads((run / "plan.json").read_text())["nodes"]
    assert sorted(node["host"] for node in nodes) == list(NODES), output


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_job_of_two_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Each has room for both tasks, and gets one; the job first waits, and says so."""
    run = tmp_path / "run"
    code, output = cluster.run(["sbatch", "--parsable", "--exclusive", "-N2", "--wrap=sleep 600"])
    assert code == 0, output
    words = [*PYTHON, *arguments(run, "--engine", "slurm", "--nodes", "2")]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = cluster.lab.start(
            words, env=cluster.environment, stdin=DEVNULL, stdout=file, stderr=file
        )
    try:
        cluster.wait(lambda: "is queued (" in log.read_text() or process.poll() is not None)
        assert cluster.run(["scancel", output.split()[0]])[0] == 0
        code = process.wait(600)
    finally:
        process.kill()
        process.close()
    output = log.read_text()
    assert code == 0, output
    assert "2 nodes by slurm, over gloo" in output
    assert "rank 0] epoch 1/1" in output
    check(run, output)
    assert "#SBATCH --nodes=2" in (run / "job.sh").read_text()
    cluster.wait(lambda: cluster.run(["squeue", "--noheader"])[1] == "")


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_inside_an_allocation_srun_is_used(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, output = cluster.run(["salloc", "--nodes=2", *PYTHON, *arguments(run)])
    assert code == 0, output
    assert "2 nodes by slurm, over gloo" in output
    assert not (run / "job.sh").exists()
    check(run, output)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_in_a_batch_script(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The launcher is on a node then, beside one of its agents."""
    run, log = tmp_path / "run", tmp_path / "log"
    script = tmp_path / "script.sh"
    words = " ".join(f"'{word}'" for word in [*PYTHON, *arguments(run)])
    script.write_text(f"#!/bin/sh\n#SBATCH --nodes=2\n#SBATCH --output={log}\n{words}\n")
    code, output = cluster.run(["sbatch", "--wait", str(script)])
    output += log.read_text()
    assert code == 0, output
    check(run, output)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_by_srun_alone(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, output = cluster.run(["srun", "--nodes=2", *PYTHON, *arguments(run)])
    assert code == 0, output
    check(run, output)


def test_what_sbatch_refuses_is_said(cluster: SlurmCluster, tmp_path: Path) -> None:
    more = ("--engine", "slurm", "--nodes", "2", "--slurm", "--partition=none")
    code, output = cluster.run([*PYTHON, *arguments(tmp_path / "run", *more)])
    assert code == 2
    assert "sbatch refused the job: sbatch: error: invalid partition" in output
    assert not (tmp_path / "run").exists()


def test_how_many_must_be_said(run_cli, tmp_path: Path) -> None:
    done = run_cli(*arguments(tmp_path / "run", "--engine", "slurm"))
    assert done.returncode == 2
    assert "--engine slurm must know how many: add --nodes N" in done.stderr


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_node_that_is_lost_costs_its_leg(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Slurm would end the whole job with the first task that fails, if it were not told."""
    run, log = tmp_path / "run", tmp_path / "log"
    settings = [f"{name}={value}" for name, value in (SLEEPING | {"train.epochs": 60}).items()]
    words = [word for pair in settings for word in ("--set", pair)]
    words = ["train", "--run", str(run), *words, "--engine", "slurm", "--nodes", "2"]
    with log.open("wb") as file:
        process = cluster.lab.start(
            [*PYTHON, *words], env=cluster.environment, stdin=DEVNULL, stdout=file, stderr=file
        )
    try:
        cluster.wait(lambda: trained_by(run, 2) or process.poll() is not None)
        first = json.loads((run / "plan.json").read_text())["nodes"][0]["host"]
        second = next(node for node in NODES if node != first)
        assert cluster.lab.signal(second, signal.SIGKILL, "paceline.launch.agent") == 1
        code = process.wait(600)
    finally:
        process.kill()
        process.close()
    assert code == 0, log.read_text()
    assert "; training goes on with " in log.read_text()


def trained_by(run: Path, nodes: int) -> bool:
    """Whether a leg of so many nodes has trained."""
    with contextlib.suppress(OSError, ValueError):
        legs = [json.loads(line) for line in (run / "legs.jsonl").read_text().splitlines()]
        return any(leg["updates"] and len(leg["plan"]["nodes"]) == nodes for leg in legs)
    return False
