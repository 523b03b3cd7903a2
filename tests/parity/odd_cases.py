"""Trainings of `odd_models` by every strategy, many in the same ranks: `python -m odd_cases RUN`.

Every training ends with weights, buffers and optimizer state, or with a refusal.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import odd_models
import torch
from cases import flat
from rank_cases import Found, run_in_ranks, through_cases
from torch import nn

from paceline import local
from paceline.data.sampler import apportion
from paceline.data.samples import Stacked
from paceline.errors import UserError
from paceline.launch.rank import leave
from paceline.local.base import Job
from paceline.local.steps import Supervised
from paceline.local.tiles import describe_tiles
from paceline.schema import NodePlan

SIZES = (8, 8, 5, 8, 3)


@dataclass(frozen=True, kw_only=True)
class Odd:
    """One training of one odd model."""

    model: str
    node: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    precision: str = "fp32"
    clip_norm: float | None = None
    sizes: tuple[int, ...] = SIZES

    def build(self) -> Any:
        torch.manual_seed(0)
        return getattr(odd_models, self.model)()

    def optimize(self, parameters: Any) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.05)
        return torch.optim.Adam(parameters, lr=0.001, weight_decay=0.05)

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The same for every strategy."""
        generator = torch.Generator().manual_seed(1)
        tokens = getattr(odd_models, self.model).tokens
        found = []
        for size in self.sizes:
            inputs = (
                torch.randint(20, (size, odd_models.TOKENS), generator=generator)
                if tokens
                else torch.randn(size, odd_models.FEATURES, generator=generator)
            )
            targets = torch.randint(odd_models.CLASSES, (size,), generator=generator)
            found.append((inputs, targets))
        return found

    def job(self, **places: Any) -> Job:
        inputs = self.batches()[0][0]
        return Job(
            build_model=self.build,
            step=Supervised(loss=nn.functional.cross_entropy),
            build_optimizer=self.optimize,
            elementwise=True,
            node=NodePlan(**self.node),
            clip_norm=self.clip_norm,
            precision=self.precision,
            sample_shape=tuple(inputs.shape[1:]),
            sample_type=inputs.dtype,
            batch_size=self.sizes[0],
            last_batch=self.sizes[-1],
            **places,
        )


def plain(case: Odd) -> dict[str, torch.Tensor]:
    """What anyone would write; nothing of Paceline."""
    model = case.build().train()
    named = list(model.named_parameters())
    optimizer = case.optimize([parameter for _, parameter in named])
    for inputs, targets in case.batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
            outputs = model(inputs)
        nn.functional.cross_entropy(outputs.float(), targets).backward()
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return flat(weights, {n: optimizer.state[p] for n, p in named if optimizer.state.get(p)})


def train(case: Odd, job: Job) -> Found:
    """The same by a strategy of Paceline; what a refusal says."""
    try:
        strategy = local.build(job)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    try:
        for step, (inputs, targets) in enumerate(case.batches()):
            parts = apportion(len(targets), [1.0] * strategy.job.node.workers, strategy.least)
            first = sum(parts[: strategy.worker])
            own = slice(first, first + parts[strategy.worker])
            strategy.update(Stacked(inputs[own], targets[own]), len(targets), step)
        strategy.prepare_evaluation()
        weights = {n: t.detach().clone() for n, t in strategy.model.state_dict().items()}
        return flat(weights, strategy.optimizer_state())
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.close()


def alone(case: Odd) -> Found:
    """A training in this process."""
    threads = torch.get_num_threads()
    try:
        return train(case, case.job())
    finally:
        torch.set_num_threads(threads)


def run_odd(folder: Path, cases: list[Odd]) -> list[Found]:
    """Every case in real ranks."""
    return run_in_ranks(folder, "odd_cases", cases)


def _act(number: int, values: Mapping[str, Any], places: dict[str, Any]) -> Found:
    case = Odd(**{**values, "sizes": tuple(values["sizes"])})
    return train(case, dataclasses.replace(case.job(), **places))


if __name__ == "__main__":
    describe_tiles()
    leave(through_cases(sys.argv[1], _act, deadline=120.0))
