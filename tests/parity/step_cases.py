"""`step_models` by every strategy, many in the same ranks: `python -m step_cases RUN`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from step_models import BATCH, EPOCHS, RATE, SAMPLES, TASKS, order

from paceline import local
from paceline.config.environment import rank_context, shared_memory
from paceline.data.base import DataRequest
from paceline.data.own import as_source
from paceline.data.sampler import apportion
from paceline.errors import UserError
from paceline.launch.local import run_ranks
from paceline.launch.rank import die_with_parent, leave, record_failure
from paceline.local.base import Job
from paceline.local.board import Arena, Board
from paceline.local.steps import OwnStep, Supervised
from paceline.run import RunDirectory
from paceline.schema import NodePlan, RankContext

Found = dict[str, torch.Tensor] | str


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
                sizes = apportion(len(numbers), [1.0] * strategy.workers, strategy.least)
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
    """Every case in real ranks, as many as the first one needs."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    before = os.environ.get("PYTHONPATH")
    kept = [] if before is None else [before]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *kept])
    try:
        assert run_ranks(RunDirectory(folder), NodePlan(**cases[0].node), module="step_cases") == 0
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    refusals = json.loads((folder / "refusals.json").read_text())
    return [
        refusals.get(str(n)) or load_file(folder / f"case-{n}.safetensors")
        for n in range(len(cases))
    ]


def _run(folder: Path, context: RankContext) -> None:
    memory = shared_memory()
    die_with_parent(memory.parent)
    board = Board(memory.board, ranks=context.local_size, rank=context.local_rank, deadline=300.0)
    board.start_heartbeat()
    refusals: dict[int, str] = {}
    try:
        for number, values in enumerate(json.loads((folder / "cases.json").read_text())):
            case = Case(**values)
            places = {"context": context, "board": board, "arena": Arena(memory.arena, board)}
            found = train(case, dataclasses.replace(case.job(), **places))
            if context.is_first and isinstance(found, str):
                refusals[number] = found
            elif context.is_first and not isinstance(found, str):
                save_file(found, folder / f"case-{number}.safetensors")
            board.barrier("next case")
        if context.is_first:
            (folder / "refusals.json").write_text(json.dumps(refusals))
    finally:
        board.close()


def main(path: str) -> int:
    """One rank's way through all cases."""
    context = rank_context()
    try:
        _run(Path(path), context)
    except BaseException as error:
        record_failure(RunDirectory(Path(path)), context, error)
        return 1
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1]))
