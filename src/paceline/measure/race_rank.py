"""What the ranks of a race run: the first one leads, the others follow its announcements.

`python -m paceline.measure.race_rank RUN`; the task is RUN/race-task.json and the
result RUN/race.json.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import load_config
from paceline.config.environment import rank_context, shared_memory
from paceline.errors import StrategyError, UserError
from paceline.launch.rank import die_with_parent, heed_signals, record_failure
from paceline.run import RunDirectory
from paceline.schema import Candidate, NodePlan, decode, encode, read_json, write_json
from paceline.schema.codec import rule
from paceline.schema.plain import parse_json

if TYPE_CHECKING:
    from paceline.local.board import Board
    from paceline.measure.trial import TrialGround

ALTERNATING = "race-alternating"
"""A file that is there while several candidates are built."""
TURN_SECONDS = 0.5
"""About so long one batch size is timed before the next one has its turn."""
SIZE_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class RaceTask:
    """What the ranks of a race are told."""

    nodes: tuple[NodePlan, ...]
    numerics: tuple[tuple[str, ...], ...]
    batch_size: int = rule(default=1, minimum=1)
    seconds: float = 40.0
    known: tuple[Candidate, ...] = ()
    """Candidates that broke an earlier attempt, with the reason."""
    quiet: bool = False
    thorough: bool = False
    alternate: bool = True
    """Whether finalists of long updates may all be built at once."""
    room_mb: float = 0.0
    """What they may then take together."""
    sizes: tuple[int, ...] = ()
    """Instead of a race: time `entry` at these batch sizes, in turns."""
    entry: Candidate | None = None


@dataclass(frozen=True, kw_only=True)
class RaceResult:
    """What the first rank leaves behind."""

    candidates: tuple[Candidate, ...] = field(default_factory=tuple)
    times: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Seconds of every timed update by batch size, where sizes were asked for."""


Lead = Callable[[RunDirectory, "TrialGround", "Board"], None]


def main(run_path: str, lead: Lead | None = None) -> int:
    """Take part in a race; the first rank leads it."""
    context = rank_context()
    memory = shared_memory()
    die_with_parent(memory.parent)
    heed_signals(context)
    run = RunDirectory(Path(run_path))
    from paceline.local.board import Arena, Board
    from paceline.local.memory import keep_freed_memory
    from paceline.measure.ground import make_ground

    keep_freed_memory()
    board = Board(memory.board, ranks=context.local_size, rank=context.local_rank)
    board.start_heartbeat()
    try:
        task = read_json(RaceTask, run.path / "race-task.json")
        arena = Arena(memory.arena, board)
        ground = make_ground(load_config(run.config), task.batch_size, board=board, arena=arena)
        if context.is_first:
            (lead or _lead)(run, ground, board)
            board.announce("")
        else:
            _follow(ground, board)
        return 0
    except BaseException as error:
        record_failure(run, context, error)
        return 1
    finally:
        board.close()


def _lead(run: RunDirectory, ground: TrialGround, board: Board) -> None:
    from paceline.measure.contest import Contest

    task = read_json(RaceTask, run.path / "race-task.json")

    def trial(
        entry: Candidate, *, warmup: int, steps: int, give_up: float | None, size: int = 0
    ) -> tuple[list[float], float | None]:
        for broken in task.known:
            if _alike(entry, broken):
                raise StrategyError(broken.reason)
        # Left where the launcher finds it should this trial bring the ranks down.
        (run.path / "race-current.json").write_text(json.dumps(encode(entry)))
        size = size or task.batch_size
        order = {"warmup": warmup, "steps": steps, "give_up": give_up, "size": size}
        _announce(board, "try", entry, **order)
        return ground.first(size).run(entry, warmup=warmup, steps=steps, give_up=give_up)

    if task.sizes:
        times = _time_sizes(task, trial)
        write_json(run.path / "race-result.json", RaceResult(times=times))
        return

    say = (lambda text: None) if task.quiet else (lambda text: print(f"  {text}", flush=True))
    contest = Contest(
        trial,
        batch_size=task.batch_size,
        seconds=task.seconds,
        say=say,
        thorough=task.thorough,
        alternation=_LedAlternation(run, ground, board) if task.alternate else None,
        room_mb=task.room_mb,
    )
    candidates = contest.run(task.nodes, [(p, f) for p, f in task.numerics])
    write_json(run.path / "race-result.json", RaceResult(candidates=tuple(candidates)))


def _time_sizes(
    task: RaceTask, trial: Callable[..., tuple[list[float], float | None]]
) -> dict[str, tuple[float, ...]]:
    """Updates of every size, in turns, so that what disturbs a machine for a while hits all alike.

    Rounds end when the time is up; every size has at least one turn.
    """
    end = time.monotonic() + task.seconds
    found: dict[int, list[float]] = {size: [] for size in task.sizes}
    for number in range(SIZE_ROUNDS):
        for size, times in found.items():
            if number and time.monotonic() > end:
                break
            assert task.entry is not None
            node = task.entry.node
            node = dataclasses.replace(node, micro_batches=min(node.micro_batches, size))
            steps = max(2, min(10, round(TURN_SECONDS / min(times)))) if times else 3
            entry = dataclasses.replace(task.entry, node=node)
            times += trial(entry, warmup=1, steps=steps, give_up=None, size=size)[0]
    return {str(size): tuple(times) for size, times in found.items()}


def _alike(entry: Candidate, broken: Candidate) -> bool:
    """What broke one candidate breaks its relatives: the same strategy at the same precision.

    One that broke at fp32 is not tried at bf16 either. One that broke in another layout than the
    plain one, which was tried before, has a model that does not bear it, whatever the strategy.
    """
    if broken.precision not in ("fp32", entry.precision):
        return False
    if broken.memory_format != "contiguous":
        return entry.memory_format == broken.memory_format
    return entry.node.strategy == broken.node.strategy


def _follow(ground: TrialGround, board: Board) -> None:
    from paceline.measure.trial import RankAlternation

    alternation = RankAlternation(ground)
    while True:
        text = board.announce()
        if not text:
            return
        order = parse_json(text)
        if order["do"] == "close":
            alternation.close()
            continue
        entry = decode(Candidate, order["entry"])
        board.activate(entry.node.ranks)
        if board.rank >= entry.node.ranks:
            continue
        try:
            if order["do"] == "build":
                alternation.build(entry)
            elif order["do"] == "update":
                alternation.update(entry)
            else:
                ground.first(order["size"]).run(
                    entry, warmup=order["warmup"], steps=order["steps"], give_up=order["give_up"]
                )
        except UserError:
            continue  # the first rank meets the same refusal and puts it into the table


def _announce(board: Board, do: str, entry: Candidate, **order: float | None) -> None:
    """Tell the ranks that stand by what comes next, and who takes part in it."""
    board.announce(json.dumps({"do": do, "entry": encode(entry), **order}))
    board.activate(entry.node.ranks)


class _LedAlternation:
    """An alternation of all ranks, led by the first."""

    def __init__(self, run: RunDirectory, ground: TrialGround, board: Board) -> None:
        from paceline.measure.trial import RankAlternation

        self._own, self._board = RankAlternation(ground), board
        self._sign = run.path / ALTERNATING

    def build(self, entry: Candidate) -> None:
        # Left where the launcher finds it should so many at once bring the ranks down.
        self._sign.touch()
        _announce(self._board, "build", entry)
        self._own.build(entry)

    def update(self, entry: Candidate) -> float:
        _announce(self._board, "update", entry)
        return self._own.update(entry)

    def close(self) -> None:
        self._board.announce(json.dumps({"do": "close"}))
        self._own.close()
        self._sign.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
