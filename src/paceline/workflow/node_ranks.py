"""The ranks of one node in a training in legs over several: this process is the first of them.

It alone talks to the other nodes. The others stand by, are asleep while no leg needs them, and
carry out with it what the node is told (`launch.standby`); the state reaches them in shared memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.cost.memory import standby_mb
from paceline.errors import PacelineError, RankError, UserError, WorkerError
from paceline.launch.leg_rank import PLACE
from paceline.launch.standby import Standby
from paceline.local.board import Arena, Board
from paceline.local.cores import divide_cores, pin
from paceline.local.memory import resident_mb, shortage
from paceline.run import RunDirectory
from paceline.schema import NodePlan, Plan, RankContext, encode
from paceline.training.handover import Handover
from paceline.workflow.runners import wait_until_ready

Result = TypeVar("Result")


@dataclass(kw_only=True)
class NodeRanks:
    """The other ranks of this node, as far as there are any."""

    run: RunDirectory
    context: RankContext
    """This node's place among all nodes."""
    cores: tuple[int, ...]
    """That all of its ranks divide among them."""
    deadline: float
    standby: Standby | None = None
    _leg: RankLeg | None = field(default=None, repr=False)

    def stand_by(self, count: int, weights_mb: float) -> dict[str, Any]:
        """Have so many ranks, this one among them: whether they are ready, or why they cannot."""
        try:
            if self.standby is None:
                needed = standby_mb(count - 1, own_mb=sum(resident_mb()), weights_mb=weights_mb)
                if why := shortage(needed):
                    return {"ready": False, "why": why}
                self.standby = Standby(self.run, count, leader=self.context)
            return {"ready": self.standby.is_ready, "why": ""}
        except PacelineError as error:
            self.end()
            return {"ready": False, "why": str(error).splitlines()[0]}

    def begin(self, plan: Plan, place: RankContext, *, started: float) -> RankLeg:
        """Let the ranks that a plan has on this node build it; this one does so after the call."""
        node = plan.nodes[place.node]
        if self.standby is not None and not self._is_well(node.ranks):
            self.end()
        if self.standby is None:
            self.standby = Standby(self.run, node.ranks, leader=self.context)
        wait_until_ready(self.standby)
        self.standby.tell(
            node.ranks,
            "leg",
            plan=encode(plan),
            began=started,
            rehearsal=False,
            place={name: getattr(place, name) for name in PLACE},
        )
        self._leg = RankLeg(self, self.standby, node)
        return self._leg

    def _is_well(self, count: int) -> bool:
        """Whether so many stand by, and none has ended meanwhile."""
        assert self.standby is not None
        try:
            self.standby.check()
        except PacelineError:
            return False
        return self.standby.count >= count

    def watch(self, board: Board) -> None:
        """From another thread: nobody waits for a rank that has gone; the agent sees the leg."""
        leg = self._leg
        if leg is not None:
            leg.standby.let_go()
            board.enter(leg.board.phase(0), leg.board.update(0))

    def forget(self, leg: RankLeg) -> None:
        if self._leg is leg:
            self._leg = None

    def end(self) -> None:
        self._leg = None
        if self.standby is not None:
            self.standby.close()
            self.standby = None


class RankLeg:
    """One leg of a node that has ranks: the board on which they agree, the memory they share."""

    def __init__(self, ranks: NodeRanks, standby: Standby, node: NodePlan) -> None:
        self._ranks, self.standby, self._count = ranks, standby, node.ranks
        self.cores = divide_cores(node.cores or ranks.cores, node.ranks, 0)
        pin(self.cores)
        self.board = Board(standby.memory.board, ranks=node.ranks, rank=0, deadline=ranks.deadline)
        self.arena = Arena(standby.memory.arena, self.board)
        self.board.start_heartbeat()

    def do(self, do: str, own: Callable[[], Result], **words: Any) -> Result:
        """Let the other ranks carry out an order while this one does its own part."""
        self.standby.tell(self._count, do, **words)
        return self.join(do, own)

    def join(self, do: str, own: Callable[[], Result]) -> Result:
        """This rank's part of what the others have been told."""
        try:
            result = own()
        except Exception as error:
            self._fail(do, error)
            raise
        self.standby.hear(self._count, do)
        return result

    def _fail(self, do: str, error: Exception) -> None:
        """Say whose fault it was; what all ranks refuse together leaves them as they are."""
        try:
            self.standby.check()  # one that has gone is the cause of whatever this one met
            self.board.abort()
            if isinstance(error, UserError):
                with contextlib.suppress(UserError):
                    self.standby.hear(self._count, do)
                return
        except PacelineError as cause:
            self._ranks.end()
            raise (RankError(str(cause)) if type(cause) is WorkerError else cause) from error
        self._ranks.end()

    def store(self, handover: Handover) -> dict[str, Any]:
        """Lay a state where the other ranks read it."""
        return handover.store(self.standby.handover)

    def copied(self, handover: Handover) -> Handover:
        """A state that does not lie in memory which the ranks share."""
        return Handover.fetch(self.standby.handover, self.store(handover))

    def close(self) -> None:
        """Let the other ranks stand by again."""
        self._ranks.forget(self)
        self.board.close()
        if self._ranks.standby is self.standby:
            try:
                self.standby.order(self._count, "close_leg")
                self.standby.board = None
            except PacelineError:
                self._ranks.end()
