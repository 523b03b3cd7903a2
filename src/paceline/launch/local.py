"""The `local` engine: ranks of one machine, started, watched and ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, NoReturn

import psutil

from paceline import errors
from paceline.config.environment import (
    QUIET,
    SharedMemory,
    rank_environment,
    shared_memory_environment,
)
from paceline.errors import WorkerError
from paceline.launch.channel import REPORT
from paceline.run import RunDirectory
from paceline.schema import NodePlan, RankContext
from paceline.schema.plain import checked, read_json_file
from paceline.signals import handled
from paceline.text import how_it_ended, printable

if TYPE_CHECKING:
    from paceline.local.board import Board

STOPPED_SECONDS = 10.0
"""A rank that the system has stopped, and whose heartbeat is older than this, will not go on."""
SILENCE_SECONDS = 60.0
"""A rank whose heartbeat is older than this is stuck; a busy machine may hold one up for less."""
START_SECONDS = 120.0
"""A rank must show its first heartbeat within this time."""
GRACE_SECONDS = 2.0
"""After a failure, how long the other ranks have to leave word."""


@dataclass
class LocalRanks:
    """The processes of one node."""

    run: RunDirectory
    first: int = 0
    """The number of the node's first rank among all ranks."""
    here: int = 0
    """Ranks of the node that are no processes of their own: 1 where this one is the first."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    board: Board | None = None
    signalled: int | None = None
    """The last signal that came."""
    passed_on: bool = False
    """Whether the first rank was there to hear of it."""

    @property
    def is_listening(self) -> bool:
        """Whether the first rank has its handlers: they come before its first heartbeat."""
        return self.board is not None and self.board.heartbeat_age(0) is not None


def run_ranks(
    run: RunDirectory,
    node: NodePlan,
    *,
    module: str = "paceline.launch.rank",
    silent: bool = False,
    context: RankContext | None = None,
    watch: Callable[[Board], None] | None = None,
    objects: dict[str, Any] | None = None,
) -> int:
    """Run every rank of this node to its end; the first rank's exit code, or an error.

    `context`: the first rank's place, where there are other nodes. `watch` gets the board.
    `objects`: what a Python program handed over instead of names, by part.
    """
    context = context or RankContext(world_size=node.ranks)
    context = dataclasses.replace(context, local_rank=0, local_size=node.ranks)
    ranks = LocalRanks(run, context.rank)
    try:
        # Before any import: a KeyboardInterrupt could be lost in some module's.
        with (
            handled(_forwarding(ranks)),
            _shared_memory(silent=silent) as memory,
            _sent(objects) as sent,
        ):
            from paceline.local.board import Board

            ranks.board = Board(memory.board, ranks=node.ranks, rank=0)
            if watch is not None:
                watch(ranks.board)
            for number in range(node.ranks):
                (run.rank(context.rank + number) / "error.json").unlink(missing_ok=True)
                place = dataclasses.replace(context, rank=context.rank + number, local_rank=number)
                program = (module, *map(str, sent))
                ranks.processes.append(_start(run, node, place, memory, program, sent))
            _watch(ranks, ranks.board)
        return ranks.processes[0].returncode
    except WorkerError:
        # Too early, or for the second time: it ended the ranks instead of stopping them in order.
        if ranks.signalled == signal.SIGINT:
            raise KeyboardInterrupt from None
        if ranks.signalled is not None:
            raise SystemExit(128 + ranks.signalled) from None
        raise
    finally:
        end_ranks(ranks)


@contextlib.contextmanager
def _shared_memory(*, silent: bool) -> Iterator[SharedMemory]:
    from paceline.local.board import anonymous_memory

    board, arena = anonymous_memory("board"), anonymous_memory("arena")
    try:
        yield SharedMemory(board=board, arena=arena, parent=os.getpid(), silent=silent)
    finally:
        os.close(board)
        os.close(arena)


@contextlib.contextmanager
def _sent(objects: dict[str, Any] | None) -> Iterator[tuple[int, ...]]:
    """The descriptor of what goes to the ranks, if anything does."""
    if not objects:
        yield ()
        return
    from paceline.launch.parcel import send

    descriptor = send(objects)
    try:
        yield (descriptor,)
    finally:
        os.close(descriptor)


def _start(
    run: RunDirectory,
    node: NodePlan,
    context: RankContext,
    memory: SharedMemory,
    program: tuple[str, ...],
    descriptors: tuple[int, ...],
) -> subprocess.Popen[bytes]:
    environment = (
        QUIET
        | dict(os.environ)
        | rank_environment(context)
        | shared_memory_environment(memory)
        | {"OMP_NUM_THREADS": str(node.threads), "GLOO_SOCKET_IFNAME": "lo"}
    )
    quiet = not context.is_leader
    return subprocess.Popen(
        [sys.executable, "-m", program[0], str(run.path), *program[1:]],
        env=environment,
        pass_fds=(memory.board, memory.arena, *descriptors),
        # A session of its own: Ctrl-C reaches the launcher alone, which decides who hears of it.
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
    )


def _watch(ranks: LocalRanks, board: Any) -> None:
    """Return when all ranks have ended well; raise as soon as one has not."""
    with selectors.DefaultSelector() as selector:
        for number, process in enumerate(ranks.processes):
            if process.stdout is not None:
                os.set_blocking(process.stdout.fileno(), False)
                selector.register(process.stdout, selectors.EVENT_READ, ranks.first + number)
        looked = time.monotonic()
        while True:
            if ranks.signalled is not None and not ranks.passed_on:
                raise WorkerError("interrupted before the first rank could hear of it")
            for key, _ in selector.select(timeout=0.05):
                if not _relay(key.fileobj, key.data):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
            codes = [process.poll() for process in ranks.processes]
            if any(code not in (None, 0) for code in codes[1:]) or codes[0] not in _GOOD:
                raise_failure(ranks, board)
            if all(code is not None for code in codes):
                return
            if not selector.get_map():
                time.sleep(0.05)
            now = time.monotonic()
            if now - looked < 1.0:  # else we were stopped ourselves, and so were they
                check_heartbeats(ranks, board)
            looked = now


_GOOD = (None, 0, 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)


def check_heartbeats(ranks: LocalRanks, board: Any) -> None:
    """Raise when a rank has not shown for long that it runs."""
    for number, process in enumerate(ranks.processes, ranks.here):
        if process.poll() is not None:
            continue
        age = board.heartbeat_age(number)
        if age is None and time.monotonic() - ranks.started > START_SECONDS:
            raise WorkerError(
                f"rank {ranks.first + number} did not start within {START_SECONDS:.0f} s"
            )
        if age is None or age < STOPPED_SECONDS:
            continue
        if age > SILENCE_SECONDS or _is_stopped(process.pid):
            raise WorkerError(
                f"rank {ranks.first + number} has not responded for {age:.0f} s (last seen in"
                f" {board.place(number)}):"
                " it is stopped or hangs; the run was ended"
            )


def _is_stopped(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False  # it has just ended, which is noticed elsewhere


def raise_failure(ranks: LocalRanks, board: Any) -> NoReturn:
    """Raise what the first failing rank has left word of."""
    board.abort()
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(p.poll() is None for p in ranks.processes):
        time.sleep(0.02)
    reports = _reports(ranks)
    dead = [
        (number, process.returncode)
        for number, process in enumerate(ranks.processes, ranks.here)
        if process.returncode is not None and process.returncode < 0
    ]
    if dead:
        number, code = dead[0]
        raise WorkerError(
            f"rank {ranks.first + number} {how_it_ended(code)} in {board.place(number)}; the run"
            " was ended"
        )
    for number, process in enumerate(ranks.processes, ranks.here):
        # A rank that left no word: what the others say of it is only the consequence.
        if (
            process.returncode
            and not (ranks.run.rank(ranks.first + number) / "error.json").exists()
        ):
            raise WorkerError(
                f"rank {ranks.first + number} {how_it_ended(process.returncode)} in"
                f" {board.place(number)}"
            )
    if reports:
        _raise_report(min(reports, key=lambda report: float(report["time"])))
    raise WorkerError("a rank ended without a word")


def _reports(ranks: LocalRanks) -> list[dict[str, Any]]:
    reports = []
    for number in range(ranks.here, ranks.here + len(ranks.processes)):
        path = ranks.run.rank(ranks.first + number) / "error.json"
        with contextlib.suppress(OSError, ValueError):
            report = checked(read_json_file(path), {**REPORT, "time": float, "traceback": str})
            if report["message"] != "another rank failed":
                reports.append(report)
    return reports


def _raise_report(report: dict[str, Any]) -> None:
    kind = getattr(errors, report["kind"], None)
    if report["expected"] and isinstance(kind, type) and issubclass(kind, errors.PacelineError):
        raise kind(report["message"])
    if report["kind"] == "BrokenPipeError":  # whoever read the output went away
        raise BrokenPipeError(errno.EPIPE, report["message"])
    raise WorkerError(
        f"rank {report['rank']} failed with {report['kind']}: {report['message']}\n"
        f"{report['traceback'].rstrip()}"
    )


def _relay(stream: IO[bytes], number: int) -> bool:
    """Pass on what a rank printed, with its number; False at the end."""
    data = stream.read()
    if data == b"":
        return False
    for line in (data or b"").decode(errors="replace").splitlines():
        print(f"[rank {number}] {printable(line)}", flush=True)
    return True


def _forwarding(ranks: LocalRanks) -> Callable[[int, FrameType | None], None]:
    """Ctrl-C, SIGTERM and SIGHUP go to the first rank, which stops all of them in order.

    Until it listens there is nothing to stop in order, and what it is sent could be lost in some
    module's import: `_watch` ends the ranks then.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        ranks.signalled = number
        if ranks.is_listening:
            ranks.passed_on = True
            with contextlib.suppress(ProcessLookupError):
                ranks.processes[0].send_signal(number)

    return forward


def end_ranks(ranks: LocalRanks) -> None:
    """Kill those that still run, and everything they started."""
    for process in ranks.processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in ranks.processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        if process.stdout is not None:
            process.stdout.close()
