"""DDP, comm hooks, pipelines and the rest of torch over each backend."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from ranks import Job, mpiexec_missing, run_ranks
from training import CHECKS

WORLDS = [("gloo", "auto", 2), ("mpi", "auto", 2), ("mpi", "network", 2)]
MISSING = mpiexec_missing()


@functools.cache
def launched(engine: str, transport: str, size: int) -> Job:
    """One launch for all checks; it is not tried again when it fails."""
    return run_ranks(engine, size, "training:everything", {"transport": transport}, timeout=600)


def _world(engine: str, transport: str, size: int) -> Any:
    marks = [pytest.mark.world_size(size)]
    if engine == "mpi":
        marks += [
            pytest.mark.slow,
            pytest.mark.mpi,
            pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
        ]
    return pytest.param(engine, transport, size, marks=marks, id=f"{engine}-{transport}-{size}")


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(("engine", "transport", "size"), [_world(*world) for world in WORLDS])
def test_training(engine: str, transport: str, size: int, name: str) -> None:
    """The check holds on every rank."""
    job = launched(engine, transport, size)
    assert job.code == 0, job.output[-3000:]
    results = job.results
    assert sorted(results) == list(range(size))
    assert [results[rank][name] for rank in range(size)] == [""] * size
