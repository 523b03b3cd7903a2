"""What a rank's process runs: `python -m paceline.launch.rank RUN`.

Torch is imported only after the process is pinned, so that its thread pool is
born on the right cores.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.config import load_config
from paceline.config.environment import rank_context, shared_memory
from paceline.errors import PacelineError
from paceline.run import RunDirectory
from paceline.schema import Config, Plan, RankContext, read_json, write_json
from paceline.schema.support import check_support
from paceline.text import printable

if TYPE_CHECKING:
    from paceline.exchange.network import Network
    from paceline.local.board import Arena, Board

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Be killed when the launcher dies, even by `kill -9`, so that no orphan stays."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def record_failure(
    run: RunDirectory, context: RankContext, error: BaseException, *, is_passed_on: bool = False
) -> None:
    """Leave word for the launcher: what failed, when, and where in the code.

    `is_passed_on`: this process says it once more, and best of all.
    """
    report = failure_report(context, error)
    if not leave_report(run.rank(context.rank), report) and not is_passed_on:
        _say(report)


def write_failure(
    folder: Path, context: RankContext, error: BaseException, memory: int | None = None
) -> None:
    """Write error.json, as launchers read it; where no room is left for it, say it at least."""
    report = failure_report(context, error)
    if not leave_report(folder, report, memory):
        _say(report)


def failure_report(context: RankContext, error: BaseException) -> dict[str, Any]:
    """What launchers read of a rank that failed."""
    return {
        "time": time.time(),
        "rank": context.rank,
        "kind": type(error).__name__,
        "message": printable(str(error)),
        "expected": isinstance(error, PacelineError),
        "traceback": printable("".join(traceback.format_exception(error))),
    }


def leave_report(folder: Path, report: dict[str, Any], memory: int | None = None) -> bool:
    """Whether word of a failure could be left: in a file, or in memory where a disk is full.

    Without it a failure looks like a loss, after which trainings are started again.
    """
    try:
        folder.mkdir(exist_ok=True)
        write_json(folder / "error.json", report)
    except OSError:
        if memory is None:
            return False
        os.pwrite(memory, json.dumps(report).encode(), 0)
    return True


def _say(report: dict[str, Any]) -> None:
    told = report["message"] if report["expected"] else report["traceback"]
    print(f"rank {report['rank']}: {told}", file=sys.stderr, flush=True)


def main(run_path: str, objects: str = "") -> int:
    """Train one rank's part of the run; `objects`: where what a Python program gave lies."""
    context = rank_context()
    die_with_parent(shared_memory().parent)
    run = RunDirectory(Path(run_path))
    heed_signals(context)
    try:
        with run.explained():
            return _train(run, context, int(objects) if objects else None)
    except BaseException as error:
        record_failure(run, context, error)
        return 1


def heed_signals(context: RankContext) -> None:
    """The launcher talks to the first rank, and all stop together.

    While there is nothing to save it leaves at once: a KeyboardInterrupt could be lost in some
    module's import. Training takes the signals over.
    """
    handler = _leave if context.is_first else signal.SIG_IGN
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(1)  # the launcher knows why


def _train(run: RunDirectory, context: RankContext, objects: int | None) -> int:
    config = load_config(run.config)
    plan = read_json(Plan, run.plan).with_servers(config.exchange.servers)
    from paceline.local.cores import divide_cores, pin, visible_cores

    node = plan.nodes[context.node]
    pin(divide_cores(node.cores or visible_cores(), context.local_size, context.local_rank))
    from paceline.local.board import Arena, Board
    from paceline.local.memory import keep_freed_memory

    memory = shared_memory()
    keep_freed_memory()
    board = Board(
        memory.board,
        ranks=context.local_size,
        rank=context.local_rank,
        deadline=config.train.deadline,
    )
    board.start_heartbeat()
    try:
        rank = Rank(
            config=config,
            plan=plan,
            run=run,
            context=context,
            board=board,
            silent=memory.silent,
            objects=objects,
        )
        return train_rank(rank, Arena(memory.arena, board))
    finally:
        board.close()


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank that is about to train."""

    config: Config
    plan: Plan
    run: RunDirectory
    context: RankContext
    board: Board
    silent: bool = False
    objects: int | None = None
    """A descriptor of what a Python program handed over instead of names."""


def train_rank(rank: Rank, arena: Arena | None = None) -> int:
    """Train one rank's part, on the network if it leads one of several nodes; its exit code."""
    from paceline.launch.parcel import receive
    from paceline.training.assemble import Task
    from paceline.training.given import Given
    from paceline.training.loop import train
    from paceline.training.progress import SilentView, make_view
    from paceline.training.serving import serve

    context = rank.context
    check_support(rank.plan, rank.config.exchange, context.backend)
    task = Task(
        config=rank.config,
        plan=rank.plan,
        run=rank.run,
        context=context,
        given=Given(**receive(rank.objects)) if rank.objects is not None else None,
        board=rank.board,
        arena=arena,
        view=make_view(silent=rank.silent, unit=rank.config.workload.unit)
        if context.is_first
        else SilentView(),
    )
    if rank.plan.nodes[context.node].role == "server":
        return serve(task)
    network = _open_network(rank)
    try:
        return train(dataclasses.replace(task, network=network)).exit_code
    finally:
        if network is not None:
            network.close()


def _open_network(rank: Rank) -> Network | None:
    """The other nodes, on a node's leader."""
    from paceline.exchange.gossip.peers import Neighbours
    from paceline.exchange.opening import open_network
    from paceline.exchange.servers.client import Served
    from paceline.training.serving import check_served

    context, deadline = rank.context, rank.config.train.deadline
    if context.nodes == 1 or not context.is_leader:
        return None
    rank.board.enter("joining the other hosts")
    if rank.plan.servers:
        check_served(rank.config, rank.plan)
        return Served(context, rank.plan, rank.config.exchange, deadline=deadline)
    if rank.plan.exchange == "hogwild":
        return Neighbours(context, rank.plan, rank.config.exchange, deadline=deadline)
    return open_network(context, [node.host for node in rank.plan.nodes], deadline=deadline)


def leave(code: int) -> NoReturn:
    """End this process now: an interpreter with torch takes up to a second to take itself down."""
    if "mpi4py.MPI" in sys.modules:  # MPI is finalized by the interpreter's own end
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
