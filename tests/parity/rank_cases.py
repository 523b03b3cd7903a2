"""Cases that the same real ranks go through one after the other: starting ranks takes seconds.

A module with cases is their program: `run_in_ranks` starts it, and it calls `through_cases`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from paceline.config.environment import rank_context, shared_memory
from paceline.launch.local import run_ranks
from paceline.launch.rank import die_with_parent, record_failure
from paceline.local.board import Arena, Board
from paceline.run import RunDirectory
from paceline.schema import NodePlan

Found = dict[str, torch.Tensor] | str
"""What a training ended with, or what was said against it."""


def run_in_ranks(folder: Path, module: str, cases: Sequence[Any]) -> list[Found]:
    """Every case in real ranks, as many as the first one needs."""
    folder.mkdir(exist_ok=True)
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, PYTHONPATH=path.rstrip(os.pathsep)):
        assert run_ranks(RunDirectory(folder), NodePlan(**cases[0].node), module=module) == 0
    return [_load(folder, number) for number in range(len(cases))]


def _load(folder: Path, number: int) -> Found:
    said = folder / f"case-{number}.txt"
    return said.read_text() if said.exists() else load_file(said.with_suffix(".safetensors"))


def through_cases(
    path: str, act: Callable[[int, Mapping[str, Any], dict[str, Any]], Found], *, deadline: float
) -> int:
    """One rank's way through all cases: `act(number, case, places)`, where places are of a job."""
    folder, context = Path(path), rank_context()
    try:
        memory = shared_memory()
        die_with_parent(memory.parent)
        ranks, rank = context.local_size, context.local_rank
        board = Board(memory.board, ranks=ranks, rank=rank, deadline=deadline)
        board.start_heartbeat()
        try:
            for number, values in enumerate(json.loads((folder / "cases.json").read_text())):
                arena = Arena(memory.arena, board)
                found = act(number, values, {"context": context, "board": board, "arena": arena})
                if context.is_first and isinstance(found, str):
                    (folder / f"case-{number}.txt").write_text(found)
                elif context.is_first and not isinstance(found, str):
                    save_file(found, folder / f"case-{number}.safetensors")
                board.barrier("next case")
        finally:
            board.close()
    except BaseException as error:
        record_failure(RunDirectory(folder), context, error)
        return 1
    return 0
