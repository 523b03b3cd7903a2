"""Ranks of one machine that stand by for legs: started once, asleep while they are not needed.

The process that leads the training keeps the state from before each leg. Whatever happens to
these ranks (killed, out of memory, stuck) costs the leg they were in, and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from paceline.config.environment import (
    SharedMemory,
    child_environment,
    rank_environment,
    shared_memory_environment,
)
from paceline.errors import PacelineError, StrategyError, WorkerError, shown
from paceline.launch.local import LocalRanks, check_heartbeats, end_ranks, raise_failure
from paceline.run import RunDirectory
from paceline.schema import RankContext
from paceline.schema.plain import ONE_LINE, checked, parse_json

Show = Callable[[dict[str, Any]], None]
NODE_RANKS = 1000
"""Ranks of a node whose first is a process of several nodes are numbered from its multiples on."""
_SHOWN = ("start_epoch", "advance", "end_epoch", "say")
_REFUSED = {"refused": str}
_DONE: dict[Any, dict[str, Any]] = {
    "go": {
        "times": [float],
        "update": int,
        "finished": bool,
        "updates": int,
        "memory_mb": float,
    },
    "finish": {"summary": {}, "exit_code": int},
    "end": {"rest": {}},
}
"""What the answers to orders hold, besides who says it."""


class Standby:
    """The ranks, and the only way to talk to them."""

    def __init__(
        self,
        run: RunDirectory,
        count: int,
        show: Show = lambda answer: None,
        objects: dict[str, Any] | None = None,
        *,
        leader: RankContext | None = None,
    ) -> None:
        """`objects`: what a Python program handed over instead of names, by part.

        `leader`: where this process is itself the first of `count` ranks, its place among nodes;
        it carries out its own part of every order between `tell` and `hear`.
        """
        from paceline.launch.parcel import send
        from paceline.local.board import Board, anonymous_memory

        self._objects = send(objects) if objects else None
        self.count = count
        self._make_board = Board
        self._show = show
        self._leader = leader
        self.memory = SharedMemory(
            board=anonymous_memory("board"), arena=anonymous_memory("arena"), parent=os.getpid()
        )
        self.handover = anonymous_memory("handover")
        self._ranks = LocalRanks(run)
        if leader is not None:
            self._ranks = LocalRanks(run, NODE_RANKS * (leader.node + 1), here=1)
        self._answers: list[_Lines] = []
        self._awake = 0
        self.board: Board | None = None
        """Of the leg that is under way."""
        try:
            for number in range(self._ranks.here, count):
                (run.rank(self._ranks.first + number) / "error.json").unlink(missing_ok=True)
                self._start(number)
        except BaseException:
            self.close()
            raise

    def _start(self, number: int) -> None:
        context = dataclasses.replace(
            self._leader or RankContext(world_size=self.count),
            rank=self._ranks.first + number,
            local_rank=number,
            local_size=self.count,
        )
        changes = rank_environment(context) | shared_memory_environment(self.memory)
        reading, writing = os.pipe()
        self._answers.append(_Lines(reading))
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "paceline.launch.leg_rank", str(self._ranks.run.path)),
                    *(str(self.handover), str(writing)),
                    *([] if self._objects is None else [str(self._objects)]),
                ],
                # One until a leg says otherwise: importing must not wake a thread per core.
                env=child_environment(changes | {"OMP_NUM_THREADS": "1"}),
                pass_fds=(*self._descriptors, writing),
                start_new_session=True,
                stdin=subprocess.PIPE,
            )
        finally:
            os.close(writing)
        self._ranks.processes.append(process)

    @property
    def is_ready(self) -> bool:
        """Whether all ranks have come up; raises if one has failed to."""
        if self._awake < len(self._answers):
            for answer in self._received(timeout=0.0):
                self._awake += answer.get("did") == "wake"
        return self._awake == len(self._answers)

    def order(self, members: int, do: str, **words: Any) -> dict[str, Any]:
        """Give the first `members` ranks an order and wait until all have carried it out."""
        self.tell(members, do, **words)
        return self.hear(members, do)

    def tell(self, members: int, do: str, **words: Any) -> None:
        """Give the first `members` ranks an order, as far as they are not this process."""
        if do == "leg":
            # Nobody looks at them between two legs: what the last one left is forgotten.
            for descriptor in (self.memory.board, self.memory.arena):
                os.ftruncate(descriptor, 0)
            self.board = self._make_board(self.memory.board, ranks=members, rank=0)
            self._ranks.started = time.monotonic()
        line = (json.dumps({"do": do, **words}) + "\n").encode()
        for process in self._ranks.processes[: members - self._ranks.here]:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                self._fail()

    def hear(self, members: int, do: str) -> dict[str, Any]:
        """Wait until they have carried an order out; what the first of them answers."""
        found: dict[int, dict[str, Any]] = {}
        while len(found) < members - self._ranks.here:
            for answer in self._received(timeout=0.1):
                if answer.get("did") == do or "refused" in answer:
                    found[answer["rank"]] = answer
        refusals = [answer["refused"] for answer in found.values() if "refused" in answer]
        if refusals:
            raise StrategyError(refusals[0])
        return found.get(0, {})

    def _received(self, timeout: float) -> Iterator[dict[str, Any]]:
        """What ranks have answered; raises when one of them has ended or hangs."""
        with selectors.DefaultSelector() as selector:
            for number, lines in enumerate(self._answers):
                selector.register(lines.descriptor, selectors.EVENT_READ, number)
            for key, _ in selector.select(timeout):
                for text in self._answers[key.data].read():
                    answer = read_answer(text)
                    if "show" in answer:
                        self._show(answer)
                    else:
                        yield answer | {"rank": key.data}
        self.check()

    def check(self) -> None:
        """Raise where a rank has ended, or hangs in the leg that is under way."""
        if any(process.poll() is not None for process in self._ranks.processes):
            self._fail()
        if self.board is not None:
            active = self._ranks.processes[: self.board.size - self._ranks.here]
            check_heartbeats(dataclasses.replace(self._ranks, processes=active), self.board)

    def let_go(self) -> None:
        """From another thread: where a rank has ended or hangs, nobody waits for it any longer."""
        board = self.board
        if board is None:
            return
        try:
            if any(process.poll() is not None for process in self._ranks.processes):
                board.abort()
            else:
                self.check()
        except PacelineError:
            board.abort()

    def _fail(self) -> None:
        from paceline.local.board import Board

        board = self.board or Board(self.memory.board, ranks=self.count, rank=0)
        raise_failure(self._ranks, board)

    def request_stop(self) -> None:
        """Ask the ranks of the leg that is under way to stop at the same update."""
        if self.board is not None:
            self.board.request_stop()

    def close(self) -> None:
        """End the ranks; whoever sleeps wakes up at the end of its orders."""
        self.board = None
        for process in self._ranks.processes:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        end_ranks(self._ranks)
        for lines in self._answers:
            os.close(lines.descriptor)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._answers.clear()

    @property
    def _descriptors(self) -> list[int]:
        objects = [] if self._objects is None else [self._objects]
        return [self.memory.board, self.memory.arena, self.handover, *objects]


def read_answer(line: bytes) -> dict[str, Any]:
    """What a rank has answered, or would show; WorkerError for anything else."""
    try:
        answer = checked(parse_json(line), {}, "the answer of a rank")
        kind = next((name for name in ("show", "refused", "did") if name in answer), "did")
        if kind == "did":
            return dict(checked(answer, {"did": ONE_LINE, **_DONE.get(answer.get("did"), {})}))
        if kind == "show" and answer["show"] not in _SHOWN:
            raise ValueError(f"nothing is called {shown(answer['show'])}")
        return dict(checked(answer, {"show": {"show": str, "with": [object]}}.get(kind, _REFUSED)))
    except (ValueError, TypeError) as error:
        raise WorkerError(f"a rank said what no rank says: {error}") from None


@dataclasses.dataclass
class _Lines:
    """Whole lines from a pipe."""

    descriptor: int
    _rest: bytes = b""

    def read(self) -> list[bytes]:
        data = os.read(self.descriptor, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines
