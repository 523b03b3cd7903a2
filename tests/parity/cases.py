"""Many trainings one after the other in the same real ranks: `python -m cases RUN`.

Starting ranks takes seconds and five updates take none, so a matrix of settings
is run by one set of ranks, as the race does with its candidates.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import own_models
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline import local, models
from paceline.config.environment import rank_context, shared_memory
from paceline.data.sampler import apportion
from paceline.data.samples import Stacked
from paceline.launch.local import run_ranks
from paceline.launch.rank import die_with_parent, leave, record_failure
from paceline.local import processes
from paceline.local.base import Job
from paceline.local.board import Arena, Board
from paceline.local.steps import Supervised
from paceline.local.tiles import describe_tiles
from paceline.run import RunDirectory
from paceline.schema import NodePlan, RankContext

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
        parts = apportion(size, [1.0] * strategy.workers, strategy.least)
        first = sum(parts[: strategy.worker])
        own = slice(first, first + parts[strategy.worker])
        result = strategy.update(Stacked(inputs[own], targets[own]), size, step)
        if not strategy.reads_inputs and strategy.workers == 1 and result.samples:
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
    """Every case in real ranks, as many as the first one needs; `sequential` ones in each."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    before = os.environ.get("PYTHONPATH")
    kept = [] if before is None else [before]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *kept])
    try:
        assert run_ranks(RunDirectory(folder), NodePlan(**cases[0].node), module="cases") == 0
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return [load_file(folder / f"case-{n}.safetensors") for n in range(len(cases))]


def _run(folder: Path, context: RankContext) -> None:
    describe_tiles()
    memory = shared_memory()
    die_with_parent(memory.parent)
    board = Board(memory.board, ranks=context.local_size, rank=context.local_rank, deadline=30.0)
    board.start_heartbeat()
    try:
        for number, values in enumerate(json.loads((folder / "cases.json").read_text())):
            case = Case(**{**values, "sizes": tuple(values["sizes"])})
            places = {"context": context, "board": board, "arena": Arena(memory.arena, board)}
            allowed = processes.can_round if case.rounded else lambda job: False
            with mock.patch.object(processes, "can_round", allowed):
                weights, state = train(case, case.job(**places))
            if context.is_first:
                save_file(flat(weights, state), folder / f"case-{number}.safetensors")
            board.barrier("next case")
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
