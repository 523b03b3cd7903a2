"""`python -m benchmarks.mpi_reads` over real MPI: the same samples by MPI-IO as by plain reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import mpiexec_missing

MISSING = mpiexec_missing()


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.world_size(2)
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_both_ways_give_the_same_samples(tmp_path: Path) -> None:
    # A number of samples that two ranks cannot divide evenly.
    words = ("--images=501", "--rounds=1", "--cold", f"--folder={tmp_path}")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mpi_reads", *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 ranks, 0.4 MB, 1 rounds\n")
    assert len(done.stdout.splitlines()) == 5
    assert not list(tmp_path.iterdir())
