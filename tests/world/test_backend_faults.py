"""Nothing hangs: every failure ends the job in seconds and says who and what."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ranks import Job, mpiexec_missing, run_ranks

MISSING = mpiexec_missing()
needs_mpi = [pytest.mark.mpi, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
pytestmark = needs_mpi

# Far below the time for which the absent rank sleeps, far above what an end should take.
LIMIT = 300.0


def failed_by_itself(job: Job) -> None:
    """The job ended by itself, not well, before the limit."""
    assert job.code is not None, f"still running after {LIMIT} s: {job.output[-2000:]}"
    assert job.code != 0


@pytest.mark.world_size(3)
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "network"])
def test_a_rank_that_never_comes_is_named(transport: str) -> None:
    """Messages, queued collectives and futures name operation and rank; Abort ends the job."""
    job = run_ranks(
        "mpi", 3, "faults:absent", {"transport": transport}, timeout=LIMIT, group_timeout=1
    )
    failed_by_itself(job)
    # The first rank to leave ends the job, perhaps before the other has written.
    rank, found = min(job.results.items())
    for name in ("barrier", "recv", "async all_reduce", "future"):
        assert f"on rank {rank}" in found[name]
        assert "timed out after 1 s" in found[name]
        assert "rank 2" in found[name]
    assert found["barrier"].startswith(f"DeadlineError: barrier on rank {rank}")
    assert found["recv"].startswith(f"DeadlineError: recv from rank 2 on rank {rank}")
    assert found["async all_reduce"].startswith(f"DeadlineError: all_reduce on rank {rank}")
    assert "the group failed before" in found["afterwards"]


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_backward_of_ddp_raises() -> None:
    """Through C++ and back, with the message, without a crash."""
    job = run_ranks("mpi", 2, "faults:absent_in_backward", timeout=LIMIT, group_timeout=2)
    failed_by_itself(job)
    assert "all_reduce on rank 0 timed out after 2 s waiting for rank 1" in job.output
    assert "Segmentation" not in job.output


@pytest.mark.world_size(3)
def test_a_killed_rank_ends_the_job() -> None:
    """The others do not wait for their own deadlines."""
    job = run_ranks("mpi", 3, "faults:killed", timeout=LIMIT, group_timeout=3600)
    failed_by_itself(job)
    assert job.results == {}


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_rank_that_raises_ends_the_job() -> None:
    """Its traceback is shown, and MPI_Finalize is not waited for."""
    job = run_ranks("mpi", 2, "faults:raises", timeout=LIMIT, group_timeout=3600)
    failed_by_itself(job)
    assert "ValueError: a mistake of this rank alone" in job.output


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_different_collectives_are_noticed() -> None:
    """Instead of wrong numbers or a hang: who calls what."""
    job = run_ranks("mpi", 2, "faults:mismatch", timeout=LIMIT, group_timeout=3600)
    for rank in (0, 1):
        assert "rank 0 is in all_reduce of 40 bytes" in job.results[rank][str(rank)]
        assert "rank 1 is in broadcast of 40 bytes" in job.results[rank][str(rank)]


def _python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ
        | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_world_that_mpiexec_did_not_start_is_refused() -> None:
    """RANK and WORLD_SIZE from elsewhere do not make MPI ranks."""
    ended = _python(
        "import torch.distributed as dist\n"
        "from paceline.backends import register_mpi\n"
        "register_mpi()\n"
        "store = dist.HashStore()\n"
        "dist.init_process_group('mpi4py', store=store, rank=0, world_size=2)\n",
        RANK="0",
        WORLD_SIZE="2",
    )
    assert ended.returncode != 0
    assert "world size of 2, but MPI started 1 rank(s): start the program with mpiexec -n 2" in (
        ended.stderr
    )


def test_names_that_cannot_be_registered_are_refused() -> None:
    """Torch's own name, a name that is taken, a transport that is not known; twice is fine."""
    ended = _python(
        "from paceline.backends import register_mpi\n"
        "for arguments in ({'name': 'mpi'}, {'name': 'gloo'}, {'transport': 'netwrok'}):\n"
        "    try:\n"
        "        register_mpi(**arguments)\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error)\n"
        "register_mpi()\n"
        "register_mpi()\n"
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("UnsupportedError the backend name 'mpi' is torch's own")
    assert lines[1].startswith("UnsupportedError the backend name 'gloo' is taken")
    assert "did you mean 'network'?" in lines[2]
