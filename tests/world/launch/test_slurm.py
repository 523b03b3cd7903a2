"""`paceline train --engine slurm` on a real Slurm that the test starts."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from slurm_cluster import SlurmCluster, obstacle

pytestmark = pytest.mark.slurm
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    reason = obstacle()
    if reason is not None:
        pytest.skip(f"no Slurm on this machine: {reason}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        found = SlurmCluster(Path(folder))
        try:
            found.start()
            yield found
        finally:
            found.close()


def arguments(run: Path, *more: str) -> list[str]:
    words = [word for pair in SETTINGS for word in ("--set", pair)]
    return ["train", "--engine", "slurm", "--run", str(run), *words, *more]


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_job_of_two_nodes(cluster: SlurmCluster, run_cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = run_cli(*arguments(run, "--nodes", "2"), env=cluster.environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes by slurm, over gloo" in done.stdout
    assert f"[{cluster.name} rank 0] epoch 1/1" in done.stdout
    assert len(json.loads((run / "plan.json").read_text())["nodes"]) == 2
    assert "#SBATCH --ntasks=2" in (run / "job.sh").read_text()
    assert cluster.run(["squeue", "--noheader"]) == ""


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_inside_an_allocation_srun_is_used(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = arguments(run)
    del words[1:3]  # no --engine: the allocation says it
    line = ["salloc", "--ntasks=2", sys.executable, "-m", "paceline.cli", *words]
    output = cluster.run(line)
    assert "2 nodes by slurm, over gloo" in output, output
    assert (run / "run.json").exists(), output
    assert json.loads((run / "run.json").read_text())["finished"]
    assert not (run / "job.sh").exists()


def test_what_sbatch_refuses_is_said(cluster: SlurmCluster, run_cli, tmp_path: Path) -> None:
    words = arguments(tmp_path / "run", "--nodes", "2", "--slurm", "--partition=none")
    done = run_cli(*words, env=cluster.environment)
    assert done.returncode == 2
    assert "sbatch refused the job: sbatch: error: invalid partition" in done.stderr
    assert not (tmp_path / "run").exists()


def test_how_many_must_be_said(run_cli, tmp_path: Path) -> None:
    done = run_cli(*arguments(tmp_path / "run"))
    assert done.returncode == 2
    assert "--engine slurm must know how many: add --nodes N" in done.stderr
