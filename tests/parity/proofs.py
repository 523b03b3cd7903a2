"""Proofs of many plans by the same ranks: `run_proofs` starts them once."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from rank_cases import Found, run_in_ranks, through_cases

from paceline import api
from paceline.config import load_config
from paceline.data.samples import Samples
from paceline.errors import ProofError
from paceline.local.base import StepResult
from paceline.local.processes import Processes
from paceline.local.replicas import Replicas
from paceline.observe.recorder import Recorder
from paceline.run import RunDirectory
from paceline.schema import NodePlan, Plan
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
    """What every proof said, in real ranks."""
    return run_in_ranks(folder, "proofs", claims)


def _act(number: int, values: Mapping[str, Any], places: dict[str, Any]) -> Found:
    claim = Claim(**{**values, "changes": tuple(values["changes"])})
    return verdict(claim, Path(sys.argv[1]) / f"claim-{number}", **places)


if __name__ == "__main__":
    sys.exit(through_cases(sys.argv[1], _act, deadline=120.0))
