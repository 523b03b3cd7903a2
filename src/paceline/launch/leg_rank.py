"""What a rank does that stands by for legs: `python -m paceline.launch.leg_rank RUN`.

It sleeps until the training's own process gives an order, takes its part in a leg, and sleeps
again. Orders come as lines of JSON on standard input, whose end ends the rank; the first rank
answers on a pipe of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from paceline.config import load_config
from paceline.config.environment import rank_context, shared_memory
from paceline.errors import UserError, WorkerError, shown
from paceline.launch.rank import die_with_parent, leave, record_failure
from paceline.run import RunDirectory
from paceline.schema import Plan, decode
from paceline.schema.plain import ONE_LINE, checked, parse_json

if TYPE_CHECKING:
    from paceline.local.board import Board
    from paceline.training.loop import Trainer

PLACE = {"rank": int, "world_size": int, "node": int, "nodes": int}
"""Of a node's first rank in a leg over several nodes."""
ORDERS: dict[str, dict[str, Any]] = {
    "leg": {"plan": {}, "began": float, "rehearsal": bool, "place?": PLACE},
    "take_over": {"rest?": {}},
    "divide": {"shares": [float]},
    "hand_over": {},
    "go": {"until": int, "patience?": float},
    "finish": {"open_seconds": float, "more": {}, "received?": int},
    "close_leg": {},
    "end": {},
}
"""What a rank can be told, and the words that belong to it."""
SHOW_SECONDS = 0.1
"""How often the first rank tells how far it is."""


def main(run_path: str, handover: int, answers: int, objects: int | None = None) -> int:
    """Stand by, and take part in legs, until there are no more orders.

    `objects`: where what a Python program handed over lies.
    """
    die_with_parent(shared_memory().parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the training's own process decides who stops when
    run = RunDirectory(Path(run_path))
    context = rank_context()
    try:
        with os.fdopen(answers, "w", buffering=1) as stream:
            LegRank(run, handover, stream, objects).serve(sys.stdin)
        return 0
    except BaseException as error:
        record_failure(run, context, error)
        return 1


def read_order(line: str) -> dict[str, Any]:
    """An order with its words, all of them; WorkerError for anything else."""
    try:
        order = checked(parse_json(line), {"do": ONE_LINE}, "an order")
        words = ORDERS.get(order["do"])
        if words is None or {"do", *order} != {"do", *(word.rstrip("?") for word in words)}:
            raise ValueError(f"{shown(order['do'])} with {shown(sorted(order))} is none")
        return dict(checked(order, words, "an order"))
    except ValueError as error:
        raise WorkerError(f"what came is no order for a rank: {error}") from None


class LegRank:
    """One rank, from leg to leg."""

    def __init__(
        self, run: RunDirectory, handover: int, answers: IO[str], objects: int | None
    ) -> None:
        # While nothing is asked of it yet: importing torch takes a second.
        from paceline.launch.parcel import receive
        from paceline.local.memory import keep_freed_memory
        from paceline.training.parts import Given, make_parts

        keep_freed_memory()
        self._run, self._handover, self._answers = run, handover, answers
        self._context = rank_context()
        self._config = load_config(run.config)
        self._given = Given(**receive(objects)) if objects is not None else None
        self._parts = make_parts(self._config, self._given)
        self._open = contextlib.ExitStack()
        self._trainer: Trainer | None = None
        self._legs = 0

    def serve(self, orders: IO[str]) -> None:
        """Carry out one order after the other."""
        self._answer(did="wake")
        for line in orders:
            order = read_order(line)
            try:
                getattr(self, f"_{order.pop('do')}")(**order)
            except UserError as error:
                # Every rank of the leg meets the same refusal; they all stand by again.
                self._close()
                self._answer(refused=str(error))
        self._close()

    def _answer(self, **words: Any) -> None:
        self._answers.write(json.dumps(words) + "\n")

    def _leg(
        self,
        plan: Mapping[str, Any],
        began: float,
        rehearsal: bool,
        place: Mapping[str, int] | None,
    ) -> None:
        """Build a plan's strategy, and prove it."""
        from paceline.training.assemble import Task
        from paceline.training.loop import Trainer
        from paceline.training.progress import SilentView
        from paceline.training.proof import prove
        from paceline.training.watching import observed

        chosen = decode(Plan, plan)
        number = self._context.local_rank
        node = chosen.nodes[0 if place is None else place["node"]]
        first = place or {"rank": 0, "world_size": node.ranks, "node": 0, "nodes": 1}
        context = dataclasses.replace(
            self._context,
            rank=first["rank"] + number,
            world_size=first["world_size"],
            local_size=node.ranks,
            node=first["node"],
            nodes=first["nodes"],
        )
        board = self._open_board(node.ranks)
        from paceline.local.board import Arena
        from paceline.local.cores import divide_cores, pin, visible_cores

        pin(divide_cores(node.cores or visible_cores(), node.ranks, number))
        task = Task(
            config=self._config,
            plan=chosen,
            run=self._run,
            context=context,
            given=self._given,
            board=board,
            arena=Arena(shared_memory().arena, board),
            view=_ToldView(self._answers) if number == 0 else SilentView(),
            ranks_before=1 if place is None else self._context.rank - context.rank,
            in_legs=place is not None,
            process_is_new=self._legs == 0,
            rehearsal=rehearsal,
        )
        self._legs += 1
        recorder = self._open.enter_context(observed(task))
        prove(task, self._parts, recorder)
        trainer = Trainer(task, self._parts, recorder, started=began)
        self._open.callback(trainer.strategy.close)
        self._trainer = trainer
        self._answer(did="leg")

    def _take_over(self, rest: dict[str, Any] | None) -> None:
        """Go on from the state that lies in memory; from none where the training begins."""
        from paceline.training.handover import Handover

        if rest is None:
            self._held.resume()
        else:
            self._held.take_over(Handover.fetch(self._handover, rest))
        self._held.recorder.ready()
        self._answer(did="take_over")

    @property
    def _held(self) -> Trainer:
        assert self._trainer is not None
        return self._trainer

    def _divide(self, shares: list[float]) -> None:
        """Divide batches otherwise from now on."""
        self._held.divide(shares)
        self._answer(did="divide")

    def _hand_over(self) -> None:
        """This rank's part of a state that the first one keeps."""
        self._held.hand_over()
        self._answer(did="hand_over")

    def _open_board(self, ranks: int) -> Board:
        from paceline.local.board import Board

        board = Board(
            shared_memory().board,
            ranks=ranks,
            rank=self._context.local_rank,
            deadline=self._config.train.deadline,
        )
        board.start_heartbeat()
        self._open.callback(board.close)
        return board

    def _go(self, until: int, patience: float | None) -> None:
        """Train up to an update."""
        from paceline.training.comparison import node_memory_mb

        trainer = self._held
        times = trainer.run_leg(until, patience)
        # Of a node among several, the first rank is elsewhere and asks nobody.
        memory = 0.0 if trainer.task.in_legs else node_memory_mb(trainer.task.board)
        self._answer(
            did="go",
            times=times,
            update=trainer.position.update,
            finished=trainer.is_finished,
            updates=trainer.updates,
            memory_mb=memory,
        )

    def _finish(self, open_seconds: float, more: Mapping[str, Any], received: int | None) -> None:
        """Write the summary of the run."""
        trainer = self._held
        outcome = trainer.end(open_seconds, more, received)
        self._answer(did="finish", summary=outcome.summary, exit_code=outcome.exit_code)

    def _close_leg(self) -> None:
        self._close()
        self._answer(did="close_leg")

    def _end(self) -> None:
        """Hand over and stand by."""
        trainer = self._held
        found = trainer.hand_over()
        rest = found.store(self._handover) if trainer.team.is_first else {}
        trainer.team.barrier("handover")
        del found
        self._close()
        self._answer(did="end", rest=rest)

    def _close(self) -> None:
        self._trainer = None
        self._open.close()


class _ToldView:
    """A view that tells another process what it would show."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._told = time.monotonic()
        self._images: list[int] = []
        self._loss: float | None = None

    def _tell(self, what: str, *arguments: Any, **named: Any) -> None:
        self._stream.write(json.dumps({"show": what, "with": arguments, "named": named}) + "\n")

    def start_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        self._tell("start_epoch", epoch, epochs, steps, done)

    def advance(self, *, images: int, loss: float | None, slowest: str = "") -> None:
        self._images.append(images)
        self._loss = loss if loss is not None else self._loss
        if time.monotonic() - self._told >= SHOW_SECONDS:
            self._advance()

    def _advance(self) -> None:
        self._told = time.monotonic()
        if self._images:
            self._tell("advance", self._images, self._loss)
            self._images = []

    def end_epoch(self, line: dict[str, Any], epochs: int) -> None:
        self._advance()
        self._tell("end_epoch", line, epochs)

    def say(self, text: str) -> None:
        self._advance()
        self._tell("say", text)

    def close(self) -> None:
        self._advance()


if __name__ == "__main__":
    leave(main(sys.argv[1], *map(int, sys.argv[2:])))
