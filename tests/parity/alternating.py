"""Several strategies built at once in the same real ranks: `python -m alternating RUN`.

As in the finals of a race of long updates, but with a learning rate that changes the weights, to
see that none of them touches another's.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from paceline import local
from paceline.launch.local import run_ranks
from paceline.local.base import Job, LocalStrategy
from paceline.local.board import Board
from paceline.measure import race_rank
from paceline.measure.trial import TrialGround
from paceline.plan.candidates import candidate
from paceline.run import RunDirectory
from paceline.schema import NodePlan, write_json

ROUNDS, BATCH = 3, 8


def run(folder: Path, ranks: int, config: str) -> dict[str, Any]:
    """What the first of so many ranks saw."""
    (folder / "config.toml").write_text(config)
    task = race_rank.RaceTask(nodes=(), numerics=(), batch_size=BATCH)
    write_json(folder / "race-task.json", task)
    with mock.patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent)):
        plan = NodePlan(strategy="processes", processes=ranks)
        assert run_ranks(RunDirectory(folder), plan, module="alternating") == 0
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def _lead(run: RunDirectory, ground: TrialGround, board: Board) -> None:
    nodes = [
        NodePlan(strategy="threads", threads=2),
        NodePlan(strategy="replicas", replicas=2),
        NodePlan(strategy="processes", processes=board.size),
        NodePlan(strategy="pipeline", stages=board.size, micro_batches=2),
    ]
    if board.size == 1:
        del nodes[2:]
    elif board.size > 2:
        nodes[3] = NodePlan(strategy="processes", processes=2)  # two of the ranks stand by
    entries = [candidate(node, "fp32", "contiguous") for node in nodes]
    entries.append(candidate(nodes[2 if board.size > 1 else 0], "fp32", "channels_last"))
    alternation = race_rank._LedAlternation(run, ground, board)
    for entry in entries:
        alternation.build(entry)
    seconds = [[alternation.update(entry) for entry in entries] for _ in range(ROUNDS)]
    after = {
        name: {key: tensor.clone() for key, tensor in built.strategy.model.state_dict().items()}
        for name, built in alternation._own._built.items()
    }
    counts = dict(_updates)
    alternation.close()
    # A trial alone goes on as if nothing had been.
    race_rank._announce(board, "try", entries[-1], warmup=1, steps=2, give_up=None, size=BATCH)
    trial, _ = ground.run(entries[-1], warmup=1, steps=2, give_up=None)
    differences, moved = {}, {}
    for name, weights in after.items():
        alone = local.build(ground._job(candidate(NodePlan())))
        before = {key: tensor.clone() for key, tensor in alone.model.state_dict().items()}
        for _ in range(counts[name]):
            alone.update(ground.inputs, ground.targets, len(ground.targets), 0)
        expected = alone.model.state_dict()
        differences[name] = _largest_difference(expected, weights)
        moved[name] = _largest_difference(expected, before)
        alone.close()
    found = {
        "entries": [entry.name for entry in entries],
        "seconds": seconds,
        "differences": differences,
        "moved": moved,
        "updates": counts,
        "trial": trial,
        "sign": (run.path / race_rank.ALTERNATING).exists(),
    }
    (run.path / "found.json").write_text(json.dumps(found))


def _largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[key] - other[key]).abs().max()) for key in one)


_updates: Counter[str] = Counter()


def _eager(job: Job) -> LocalStrategy:
    """A strategy whose learning rate cannot be changed, and which counts its updates."""
    strategy = _build(job)
    name = candidate(job.node, job.precision, job.memory_format).name
    update = strategy.update

    def counted(inputs: torch.Tensor, targets: torch.Tensor, total: int, step: int) -> Any:
        _updates[name] += 1
        return update(inputs, targets, total, step)

    strategy.scale_rate = lambda _: None  # type: ignore[method-assign]
    strategy.update = counted  # type: ignore[method-assign]
    return strategy


_build = local.build


if __name__ == "__main__":
    with mock.patch.object(local, "build", _eager):
        sys.exit(race_rank.main(sys.argv[1], _lead))
