"""`step_models` by every strategy, many in the same ranks: `python -m step_cases RUN`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rank_cases import Found, run_in_ranks, through_cases
from step_models import BATCH, EPOCHS, RATE, SAMPLES, TASKS, order

from paceline import local
from paceline.data.base import DataRequest
from paceline.data.own import as_source
from paceline.data.sampler import apportion
from paceline.errors import UserError
from paceline.launch.rank import leave
from paceline.local.base import Job
from paceline.local.steps import OwnStep, Supervised
from paceline.schema import NodePlan


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training."""

    task: str
    node: dict[str, Any]
    clip_norm: float | None = None

    def job(self, **places: Any) -> Job:
        task = TASKS[self.task]

        def build() -> Any:
            torch.manual_seed(0)
            return task.model()

        return Job(
            build_model=build,
            step=OwnStep(function=task.step, name=self.task)
            if task.step is not None
            else Supervised(loss=task.loss, name=self.task, weighs=True),
            build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9),
            elementwise=True,
            node=NodePlan(**self.node),
            clip_norm=self.clip_norm,
            sample_shape=(4,),
            sample_type=torch.float32,
            batch_size=BATCH,
            last_batch=SAMPLES % BATCH,
            **places,
        )


def train(case: Case, job: Job) -> Found:
    """The updates of two epochs on this rank; what a refusal says."""
    task = TASKS[case.task]
    request = DataRequest(name="own", nested=True, collate_fn=task.collate)
    source = as_source(task.data, seed=0, request=request)
    try:
        strategy = local.build(job)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    step = 0
    try:
        for epoch in range(EPOCHS):
            for start in range(0, SAMPLES, BATCH):
                numbers = order(epoch)[start : start + BATCH]
                sizes = apportion(len(numbers), [1.0] * strategy.job.node.workers, strategy.least)
                first, mine = sum(sizes[: strategy.worker]), sizes[strategy.worker]
                samples = source.samples(
                    numbers[first : first + mine],
                    epoch=0,
                    augment=False,
                    sizes=strategy.parts(mine),
                )
                strategy.update(samples, len(numbers), step)
                step += 1
        strategy.prepare_evaluation()
        return {n: t.detach().clone() for n, t in strategy.model.state_dict().items()}
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.close()


def run_cases(folder: Path, cases: list[Case]) -> list[Found]:
    """Every case in real ranks."""
    return run_in_ranks(folder, "step_cases", cases)


def _act(number: int, values: Mapping[str, Any], places: dict[str, Any]) -> Found:
    case = Case(**values)
    return train(case, dataclasses.replace(case.job(), **places))


if __name__ == "__main__":
    leave(through_cases(sys.argv[1], _act, deadline=300.0))
