"""Proofs of many plans by the same ranks: `run_proofs` starts them once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from paceline import api
from paceline.config import load_config
from paceline.config.environment import rank_context, shared_memory
from paceline.data.samples import Samples
from paceline.errors import ProofError
from paceline.launch.local import run_ranks
from paceline.launch.rank import die_with_parent, record_failure
from paceline.local.base import StepResult
from paceline.local.board import Arena, Board
from paceline.local.processes import Processes
from paceline.local.replicas import Replicas
from paceline.observe.recorder import Recorder
from paceline.run import RunDirectory
from paceline.schema import NodePlan, Plan, RankContext
from paceline.schema.strategies import STRATEGIES
from paceline.training.assemble import Task
from paceline.training.parts import make_parts
from paceline.training.proof import prove

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A plan for a workload, and what its proof should say (empty: that it is right)."""

    node: dict[str, Any]
    model: str = "plain"
    loss: str = "cross_entropy"
    changes: tuple[str, ...] = ()
    memory_format: str = "contiguous"
    precision: str = "fp32"
    broken: bool = False
    """One gradient is too long, by a hundredth."""
    said: tuple[str, ...] = field(default=())

    def settings(self) -> tuple[str, ...]:
        loss = self.loss if self.loss == "cross_entropy" else f"{HERE}/proof_models.py:{self.loss}"
        return (
            f"workload.model={HERE}/proof_models.py:{self.model}",
            f"workload.loss={loss}",
            "workload.data=synthetic",
            "workload.batch_size=24",
            "data.options.shape=[1, 8, 8]",
            "data.options.samples=100",
            "data.options.test_samples=20",
            *self.changes,
        )


class TooLongReplicas(Replicas):
    """A strategy with a fault."""

    def _apply(self, result: StepResult, total: int) -> None:
        dict(self._named)["1.weight"].grad.mul_(1.01)  # type: ignore[union-attr]
        super()._apply(result, total)


class TooLongProcesses(Processes):
    """A strategy with a fault."""

    def update(self, samples: Samples, total: int, step: int) -> StepResult:
        hook = dict(self.model.named_parameters())["1.weight"].register_hook(lambda g: g * 1.01)
        try:
            return super().update(samples, total, step)
        finally:
            hook.remove()


def verdict(claim: Claim, folder: Path, **places: Any) -> str:
    """What the proof says: an empty text where the plan passes."""
    config = api.resolve(load_config(None, claim.settings()))
    plan = Plan(
        nodes=(NodePlan(**claim.node),),
        batch_size=config.workload.global_batch(1),
        memory_format=claim.memory_format,
        precision=claim.precision,
    )
    folder.mkdir(exist_ok=True)
    task = Task(config=config, plan=plan, run=RunDirectory(folder), **places)
    parts = make_parts(config)
    own = STRATEGIES.own
    broken = {
        name: dataclasses.replace(own[name], place=f"proofs:TooLong{name.title()}")
        for name in ("replicas", "processes")
    }
    with contextlib.ExitStack() as stack:
        if claim.broken:
            stack.enter_context(mock.patch.object(STRATEGIES, "own", {**own, **broken}))
        try:
            prove(task, parts, Recorder())
        except ProofError as error:
            return str(error)
        finally:
            parts.dataset.close()
    return ""


def run_proofs(folder: Path, claims: list[Claim]) -> list[str]:
    """Every claim in real ranks, as many as the first one needs."""
    import dataclasses

    folder.mkdir(exist_ok=True)
    (folder / "claims.json").write_text(json.dumps([dataclasses.asdict(c) for c in claims]))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *([before] if before else [])])
    try:
        node = NodePlan(**claims[0].node)
        assert run_ranks(RunDirectory(folder), node, module="proofs") == 0
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return list(json.loads((folder / "verdicts.json").read_text()))


def _run(folder: Path, context: RankContext) -> None:
    memory = shared_memory()
    die_with_parent(memory.parent)
    board = Board(memory.board, ranks=context.local_size, rank=context.local_rank, deadline=120.0)
    board.start_heartbeat()
    found = []
    try:
        for number, values in enumerate(json.loads((folder / "claims.json").read_text())):
            claim = Claim(**{**values, "changes": tuple(values["changes"])})
            arena = Arena(memory.arena, board)
            places = {"context": context, "board": board, "arena": arena}
            found.append(verdict(claim, folder / f"claim-{number}", **places))
            board.barrier("next claim")
    finally:
        board.close()
    if context.is_first:
        (folder / "verdicts.json").write_text(json.dumps(found))


def main(path: str) -> int:
    """One rank's way through all claims."""
    context = rank_context()
    try:
        _run(Path(path), context)
    except BaseException as error:
        record_failure(RunDirectory(Path(path)), context, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
