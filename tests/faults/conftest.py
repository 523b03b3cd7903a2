"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import STRATEGIES, PacedTraining, Training

from paceline import cli

MakeTraining = Callable[..., Training]


@pytest.fixture
def training(tmp_path: Path) -> MakeTraining:
    """`training("name", train__epochs=2)`: a training in a run directory of that name."""
    return lambda name, **changes: Training(tmp_path / name, **changes)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PacedTraining]:
    """`whole("threads")`: a training of that strategy that nothing has interrupted."""
    known: dict[str, PacedTraining] = {}
    folder = tmp_path_factory.mktemp("whole")

    def get(strategy: str) -> PacedTraining:
        if strategy not in known:
            known[strategy] = PacedTraining(folder / strategy, **STRATEGIES[strategy])
            with pytest.raises(SystemExit) as caught:
                cli.main(known[strategy].begin)
            assert caught.value.code == 0
        return known[strategy]

    return get
