"""A program that stands in for training: shows where it is, prints, and fails as it is told.

    python -m standin RUN SILENT

RUN/standin.json: { "updates": 5, "pause": 0.05, "fault": { "1": "raise" } }, faults by node.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

from paceline.config.environment import agent_process, handed_board, rank_context
from paceline.errors import DeadlineError
from paceline.launch.child import STACK_SIGNAL
from paceline.launch.rank import die_with_parent
from paceline.local.board import Board


def main(run: Path) -> int:
    die_with_parent(agent_process())
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    stopped: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: stopped.append(number))
    orders = json.loads((run / "standin.json").read_text())
    context = rank_context()
    descriptor = handed_board()
    assert descriptor is not None
    board = Board(descriptor, ranks=context.local_size, rank=0)
    fault = orders.get("fault", {}).get(str(context.node))
    print(f"node {context.node} of {context.nodes}, rank {context.rank}, {context.backend}")
    print("to standard error", file=sys.stderr, flush=True)
    for update in range(1, orders["updates"] + 1):
        board.enter("update", update)
        time.sleep(orders["pause"])
        if update == 1:
            alive = run / f"alive-{context.node}"
            alive.with_suffix(".partial").write_text(str(os.getpid()))
            alive.with_suffix(".partial").replace(alive)
        if stopped or (run / "stop").exists():
            (run / "stop").touch()
            return 130 if stopped else 0
        if update == 3 and fault == "raise":
            raise ValueError("the sample of doom")
        if update == 3 and fault == "late":
            raise DeadlineError("rank 1 did not arrive within 60 s")
        if update == 3 and fault == "hang":
            hanging_here()
        if update == 3 and fault == "exit":
            os._exit(7)
        if update == 3 and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return 0


def hanging_here() -> None:
    time.sleep(600)


def leave_word(run: Path, error: Exception) -> None:
    context = rank_context()
    folder = run / f"node-{context.node}"
    folder.mkdir(exist_ok=True)
    report = {
        "rank": context.rank,
        "kind": type(error).__name__,
        "message": str(error),
        "expected": False,
        "traceback": "Traceback: here",
    }
    (folder / "error.json").write_text(json.dumps(report))


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except (ValueError, DeadlineError) as error:
        leave_word(Path(sys.argv[1]), error)
        sys.exit(1)
