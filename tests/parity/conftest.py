"""What the parity tests of several nodes share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from node_runs import state
from runs import train_weights


@pytest.fixture(scope="session")
def alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[tuple[str, ...]], dict[str, torch.Tensor]]:
    """Weights and optimizer state that one process ends with, by settings."""

    @cache
    def train(changes: tuple[str, ...]) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("alone")
        train_weights(folder, *changes)
        return state(next(folder.iterdir()))

    return train
