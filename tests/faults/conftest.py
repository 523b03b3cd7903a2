"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import Training

MakeTraining = Callable[..., Training]


@pytest.fixture
def training(tmp_path: Path) -> MakeTraining:
    """`training("name", train__epochs=2)`: a training in a run directory of that name."""
    return lambda name, **changes: Training(tmp_path / name, **changes)
