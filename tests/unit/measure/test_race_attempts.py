"""What a race does when its ranks come down."""

from __future__ import annotations

import pytest

from paceline.errors import WorkerError
from paceline.launch import local
from paceline.measure import race
from paceline.measure.race_rank import ALTERNATING, RaceResult, RaceTask
from paceline.plan.candidates import candidate
from paceline.run import RunDirectory
from paceline.schema import Config, NodePlan, read_json, write_json


@pytest.mark.parametrize("alternating", [True, False])
def test_candidates_that_fail_together_are_not_blamed(
    alternating: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed for memory while several were built, say: then each is tried alone."""
    tasks: list[RaceTask] = []

    def run_ranks(run: RunDirectory, node: NodePlan, *, module: str) -> int:
        tasks.append(read_json(RaceTask, run.path / "race-task.json"))
        if len(tasks) == 1:
            write_json(run.path / "race-current.json", candidate(NodePlan(strategy="replicas")))
            if alternating:
                (run.path / ALTERNATING).touch()
            raise WorkerError("rank 0 was killed by SIGKILL")
        assert not (run.path / ALTERNATING).exists()
        write_json(run.path / "race-result.json", RaceResult(candidates=(candidate(NodePlan()),)))
        return 0

    monkeypatch.setattr(local, "run_ranks", run_ranks)
    result = race._in_ranks(Config(), RaceTask(nodes=(NodePlan(),), numerics=(("fp32", "any"),)))
    assert len(result.candidates) == 1
    assert [task.alternate for task in tasks] == [True, not alternating]
    assert [len(task.known) for task in tasks] == [0, 0 if alternating else 1]
