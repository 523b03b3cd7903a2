"""What functions keep outside of the model: found, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.training.outside import Outside

COUNT = {"steps": 0}
LOSSES: list[float] = []
TEACHER = nn.Linear(2, 2)
NUMBERS = np.zeros(3)
NUMBER = 0
BUILT: nn.Module | None = None


@functools.lru_cache
def features(width: int) -> torch.Tensor:
    return torch.rand(width)


def counts() -> None:
    COUNT["steps"] += 1


def rebinds() -> None:
    global NUMBER
    NUMBER += 1


def builds() -> None:
    global BUILT
    if BUILT is None:
        BUILT = nn.Linear(3, 3)


def moves_a_teacher() -> None:
    with torch.no_grad():
        TEACHER.weight.mul_(0.9)


def writes_an_array() -> None:
    NUMBERS[1] += 1


def through_another() -> None:
    counts()


def caches() -> None:
    features(3)


def closure() -> Callable[[], None]:
    seen = 0

    def step() -> None:
        nonlocal seen
        seen += 1

    return step


class Counting:
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"batches": 0}

    def __call__(self) -> None:
        self.seen["batches"] += 1


CHANGES = {
    "counts": counts, "rebinds": rebinds, "builds": builds, "teacher": moves_a_teacher,
    "array": writes_an_array, "another": through_another, "caches": caches, "closure": closure(),
    "object": Counting(), "method": Counting().__call__, "partial": functools.partial(counts),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_found_and_put_back(name: str) -> None:
    step = CHANGES[name]
    outside = Outside([step])
    assert not outside.changed()
    step()
    assert outside.changed()
    outside.restore()
    assert not outside.changed()
    assert not Outside([step]).changed()


def test_a_list_that_grows_is_a_record() -> None:
    def records() -> None:
        LOSSES.append(0.5)

    outside = Outside([records])
    records()
    assert outside.changed() == "LOSSES"
    assert not outside.changed(growing=False)
    outside.restore()
    assert LOSSES == []


def test_installed_packages_are_left_alone() -> None:
    outside = Outside([nn.functional.cross_entropy, nn.Linear.forward])
    nn.functional.cross_entropy(torch.rand(2, 3), torch.tensor([0, 1]))
    assert not outside.changed()
