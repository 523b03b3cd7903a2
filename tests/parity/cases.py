"""Many trainings one after the other in the same real ranks: `python -m cases RUN`.

Starting ranks takes seconds and five updates take none, so a matrix of settings
is run by one set of ranks, as the race does with its candidates.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import own_models
import torch
from rank_cases import Found, run_in_ranks, through_cases
from torch import nn

from paceline import local, models
from paceline.data.sampler import apportion
from paceline.data.samples import Stacked
from paceline.launch.rank import leave
from paceline.local import processes
from paceline.local.base import Job
from paceline.local.steps import Supervised
from paceline.local.tiles import describe_tiles
from paceline.schema import NodePlan

SIZES = (16, 16, 12, 16, 7)
"""Samples of the five updates: an even batch, one that 4 does not divide into 4s, a prime."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training of five updates."""

    model: str = "mnist_cnn"
    node: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    clip_norm: float | None = None
    precision: str = "fp32"
    memory_format: str = "contiguous"
    sizes: tuple[int, ...] = SIZES
    local_batch_norm: bool = False
    rounded: bool = True
    """False: autocast rounds the weights on each rank, as it does by itself."""

    def job(self, **places: Any) -> Job:
        return Job(
            build_model=lambda: _model(self.model),
            step=Supervised(loss=nn.functional.cross_entropy),
            build_optimizer=_optimizer(self.optimizer),
            elementwise=True,
            node=NodePlan(**self.node),
            clip_norm=self.clip_norm,
            precision=self.precision,
            memory_format=self.memory_format,
            sample_shape=(1, 28, 28),
            batch_size=self.sizes[0],
            local_batch_norm=self.local_batch_norm,
            **places,
        )


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if hasattr(own_models, name):
        return getattr(own_models, name)()
    if name == "mnist_cnn":
        return models.build(name, classes=10, channels=1, image_size=28, options={"dropout": 0.0})
    return models.build(name, classes=10, channels=1, options={"stem": "small"})


def _optimizer(name: str) -> Any:
    if name == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return lambda parameters: torch.optim.Adam(parameters, lr=0.001)


def train(case: Case, job: Job) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The five updates on this rank; weights and optimizer state after them."""
    strategy = local.build(job)
    generator = torch.Generator().manual_seed(1)
    for step, size in enumerate(case.sizes):
        inputs = torch.randn(size, 1, 28, 28, generator=generator)
        targets = torch.randint(10, (size,), generator=generator)
        parts = apportion(size, [1.0] * strategy.job.node.workers, strategy.least)
        first = sum(parts[: strategy.worker])
        own = slice(first, first + parts[strategy.worker])
        result = strategy.update(Stacked(inputs[own], targets[own]), size, step)
        if not strategy.reads_inputs and strategy.job.node.workers == 1 and result.samples:
            assert result.samples == size
    strategy.prepare_evaluation()
    weights = {n: t.detach().clone() for n, t in strategy.model.state_dict().items()}
    state = strategy.optimizer_state()
    strategy.close()
    return weights, state


def flat(weights: dict[str, torch.Tensor], state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights and optimizer state as one set of named tensors."""
    entries = {
        f"{name}|{key}": torch.as_tensor(value)
        for name, values in state.items()
        for key, value in values.items()
        if value is not None
    }
    return {n: t.contiguous() for n, t in (weights | entries).items()}


def sequential(case: Case) -> Case:
    """The same training by the strategy that all others are held against."""
    return Case(**{**asdict(case), "node": {"strategy": "sequential"}})


def reference(case: Case) -> dict[str, torch.Tensor]:
    """What `sequential` makes of the same case, in this process."""
    threads = torch.get_num_threads()
    try:
        plain = sequential(case)
        return flat(*train(plain, plain.job()))
    finally:
        torch.set_num_threads(threads)


def run_cases(folder: Path, cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    """Every case in real ranks; `sequential` ones in each."""
    return run_in_ranks(folder, "cases", cases)


def _act(number: int, values: Mapping[str, Any], places: dict[str, Any]) -> Found:
    case = Case(**{**values, "sizes": tuple(values["sizes"])})
    allowed = processes.can_round if case.rounded else lambda job: False
    with mock.patch.object(processes, "can_round", allowed):
        return flat(*train(case, case.job(**places)))


if __name__ == "__main__":
    describe_tiles()
    leave(through_cases(sys.argv[1], _act, deadline=30.0))
