"""The conformance matrix, from one launch per backend and world size.

A test is one collective on one type over one transport, in every shape.
"""

from __future__ import annotations

import functools
from typing import Any

import conformance
import pytest
from expectations import expected
from ranks import mpiexec_missing

MISSING = mpiexec_missing()


@functools.cache
def outcome(engine: str, size: int) -> Any:
    """Every case of one launch, or what went wrong with it: it is not tried again."""
    try:
        return conformance.verdicts(engine, size)
    except AssertionError as error:
        return str(error)


def _world(engine: str, transport: str, size: int) -> Any:
    marks = [pytest.mark.world_size(size)]
    if size == 4 or transport != "auto":
        marks.append(pytest.mark.slow)
    if engine == "mpi":
        marks += [pytest.mark.mpi, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
    name = engine if transport == "auto" else f"{engine}-{transport}"
    return pytest.param(engine, transport, size, marks=marks, id=f"{name}-{size}")


WORLDS = [
    _world(engine, transport, size)
    for engine, transport in (("gloo", "auto"), ("mpi", "auto"), ("mpi", "network"))
    for size in (1, 2, 4)
]


@pytest.mark.parametrize("dtype", conformance.DTYPES)
@pytest.mark.parametrize("operation", conformance.COLLECTIVES)
@pytest.mark.parametrize(("engine", "transport", "size"), WORLDS)
def test_collective(engine: str, transport: str, size: int, operation: str, dtype: str) -> None:
    """Every shape gives the right tensors, or what the table of expectations says it gives."""
    found = outcome(engine, size)
    assert isinstance(found, dict), found
    cases = [name for name in conformance.cases() if name.startswith(f"{operation}/{dtype}/")]
    assert len(cases) >= len(conformance.SHAPES)
    for case in cases:
        kind, why = found[transport][case]
        assert kind == expected(engine, case, size), f"{case}: {why}"
