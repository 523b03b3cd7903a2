"""What an agent starts to train one node: `python -m paceline.launch.member RUN SILENT`."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from paceline.config.environment import (
    agent_process,
    handed_board,
    rank_context,
    take_report,
)
from paceline.launch.child import STACK_SIGNAL
from paceline.launch.rank import die_with_parent, leave, write_failure
from paceline.run import RunDirectory

if TYPE_CHECKING:
    from paceline.local.board import Board

_COPY_SECONDS = 0.2
INTERRUPTED = 3
"""Exit code of a node that was interrupted before it trained."""


def main(run_path: str, silent: str, work: Callable[..., int] | None = None) -> int:
    """Train this node; leave word in RUN/node-N/error.json of what went wrong.

    `work` does it, if not `run_node`.
    """
    die_with_parent(agent_process())
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    # Until training takes them over there is nothing to save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    run, context, memory = RunDirectory(Path(run_path)), rank_context(), take_report()
    try:
        from paceline.launch.node import run_node

        with run.explained():
            return (work or run_node)(run, context, silent=silent == "1", watch=_show_agent)
    except BaseException as error:
        write_failure(run.path / f"node-{context.node}", context, error, memory)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a collective that still waits must not keep this process


def _show_agent(board: Board) -> None:
    """Copy where the ranks are to the board that the agent looks at."""
    descriptor = handed_board()
    if descriptor is None:
        return
    from paceline.local.board import Board

    copies = [Board(descriptor, ranks=board.size, rank=rank) for rank in range(board.size)]

    def copy() -> None:
        while True:
            for rank, place in enumerate(copies):
                place.enter(board.phase(rank), board.update(rank))
            time.sleep(_COPY_SECONDS)

    threading.Thread(target=copy, name="paceline-places", daemon=True).start()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    leave(main(sys.argv[1], sys.argv[2]))
