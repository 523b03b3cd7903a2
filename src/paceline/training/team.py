"""What the loop asks of the other ranks; with one rank, nothing at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.exchange.agreement import broadcast_tensors, broadcast_text
from paceline.local.board import Board
from paceline.local.steps import Step, Sums
from paceline.schema import RankContext
from paceline.schema.plain import parse_json

if TYPE_CHECKING:
    from torch import nn

    from paceline.exchange.network import Network, Pending


class Team:
    """All ranks of a run, seen from one of them.

    Inside a node ranks agree through the board, and the leaders of nodes over the network.
    """

    def __init__(
        self, context: RankContext, board: Board | None, network: Network | None = None
    ) -> None:
        self.context = context
        self.board = board
        self.network = network
        self._requested = False
        self._flag: tuple[torch.Tensor, Pending] | None = None
        self._stop_at: int | None = None
        self._seconds = 0.0
        self._wishes_leg_end = False
        self._leg_end: int | None = None
        self._wishes_save = False
        self._save_at: int | None = None
        self.busy = [0.0] * context.nodes
        """Seconds that an update takes each node, waiting left out, smoothed."""
        self.took: list[list[float]] = []
        """The same of each update of the current leg, as far as word of it has come."""

    @property
    def is_first(self) -> bool:
        return self.context.is_first

    def enter(self, phase: str, update: int) -> None:
        """Say where this rank is."""
        if self.board is not None:
            self.board.enter(phase, update)
        if self.network is not None:
            self.network.place = f"{phase} {update}"

    def sum(self, values: Sequence[float], name: str) -> list[float]:
        total = list(values) if self.board is None else self.board.sum(values, name)
        if self.context.nodes == 1:
            return total
        if self.network is not None:
            total = self.network.total(total, name)
        if self.board is None:
            return total
        return self.board.sum(total if self.context.is_leader else [0.0] * len(total), name)

    def from_first(self, text: str, name: str) -> str:
        """What the first rank of all says, on every rank; the others stand by until it comes."""
        if self.network is not None:
            text = broadcast_text(self.network, text, name)
        return text if self.board is None else self.board.announce(text)

    def sum_by_node(self, value: float, name: str) -> list[float]:
        """One number per node: the sum over its ranks."""
        mine = [0.0] * self.context.nodes
        mine[self.context.node] = value
        return self.sum(mine, name)

    def barrier(self, name: str) -> None:
        if self.context.nodes > 1:
            self.sum([0.0], name)
        elif self.board is not None:
            self.board.barrier(name)

    def share_buffers(self, model: nn.Module) -> None:
        """Give the leaders of all nodes the first node's buffers (running statistics)."""
        if self.network is not None:
            broadcast_tensors(self.network, model.buffers(), "the buffers")

    def request_stop(self) -> None:
        """Called from a signal handler: stop soon, all at the same update."""
        self._requested = True
        if self.board is not None and self.context.nodes == 1:
            self.board.request_stop()

    def request_save(self, updates_done: int) -> None:
        """Save soon, all ranks after the same update; asked again, once is enough."""
        if self.context.nodes > 1:
            self._wishes_save = (self.save_at or 0) < updates_done
        elif self.board is None:
            self._save_at = updates_done
        elif (self.board.save_at or 0) < updates_done:
            self.board.request_save()

    @property
    def save_at(self) -> int | None:
        """The update after which all ranks save, if they were asked to."""
        return self._save_at if self.board is None else self.board.save_at

    @property
    def waited(self) -> float:
        """Seconds for which this node has stood still for others in this epoch."""
        return 0.0 if self.network is None else self.network.traffic.waited

    def note_busy(self, seconds: float) -> None:
        """What the last update took this node, waiting for other nodes left out."""
        self._seconds = seconds

    @property
    def slowest(self) -> int | None:
        """The node whose updates take longest, as far as this rank knows."""
        longest = max(self.busy, default=0.0)
        return self.busy.index(longest) if longest > 0 else None

    def should_stop(self, updates_done: int) -> bool:
        """True when all ranks stop after this update; all ranks ask after every update."""
        if self.context.nodes > 1:
            return self._should_stop_together(updates_done)
        if self.board is not None:
            return self.board.should_stop(updates_done)
        return self._requested

    def begin_leg(self, updates_done: int) -> None:
        """Before the first update of a leg; every rank of the leg calls it."""
        self._hear_wishes(updates_done)
        self._wishes_leg_end, self._leg_end = False, None
        self.took.clear()

    def end_leg_soon(self) -> None:
        """End the leg before its time: all nodes at the same update, one that none has begun."""
        self._wishes_leg_end = True

    @property
    def leg_end(self) -> int | None:
        """The update at which the leg ends before its time, if it does."""
        return self._leg_end if self.board is None or self.network else self.board.leg_end

    def _hear_wishes(self, updates_done: int) -> None:
        """What all nodes have said after the update before."""
        if self._flag is None:
            return
        (flag, pending), self._flag = self._flag, None
        pending.wait()
        stop, leg_end, save, *took = flag.tolist()
        self.busy = [0.9 * old + 0.1 * new for old, new in zip(self.busy, took, strict=True)]
        self.took.append(took)
        # Other ranks of this node may be an update ahead of the leader.
        if stop > 0:
            self._stop_at = updates_done + 2
            if self.board is not None:
                self.board.stop_at(self._stop_at)
        if save > 0:
            self._wishes_save, self._save_at = False, updates_done + 2
            if self.board is not None:
                self.board.save_after(self._save_at)
        if leg_end > 0 and self._leg_end is None:
            self._leg_end = updates_done + 2
            if self.board is not None:
                self.board.end_leg_at(self._leg_end)

    def _should_stop_together(self, updates_done: int) -> bool:
        """Wishes to stop, and each node's time, travel while the next update is computed."""
        if self.network is not None and self._stop_at is None:
            self._hear_wishes(updates_done)
            flag = torch.zeros(3 + self.context.nodes)
            flag[0], flag[1] = float(self._requested), float(self._wishes_leg_end)
            flag[2] = float(self._wishes_save)
            flag[3 + self.context.node] = self._seconds
            self._flag = (flag, self.network.sum(flag, "the wish to stop"))
        if self.board is not None:
            return self.board.should_stop(updates_done)
        return self._stop_at is not None and updates_done >= self._stop_at

    # --- where nodes go at their own pace (parameter servers); the others need none of it ---

    is_steady = True
    """Everyone stays to the end, so that shares can follow measured speeds."""
    adds_up = True
    """`sum` gives the sum over all ranks of anything, at any time."""

    @property
    def evaluates(self) -> bool:
        """This rank takes part in evaluations."""
        return True

    def evaluation_shares(self, shares: list[float]) -> list[float]:
        """Every rank's part of an evaluation, which all ranks ask for together."""
        return shares

    def is_behind(self, update: int) -> bool:
        """The others have done this update without this rank, which leaves it out."""
        return False

    def note(self, loss_sum: float, correct: float, samples: int) -> None:
        """Tell what an update gave, where nobody asks for sums."""

    def news(self) -> list[str]:
        """Lines for the user about nodes that came and went."""
        return []

    def wait_for_all(self) -> float:
        """Before the last evaluation: seconds waited for nodes at a pace of their own."""
        return 0.0

    def epoch_line(self) -> dict[str, Any]:
        """What else belongs into the epoch's line of metrics."""
        return {}

    def close(self) -> None:
        """Wait for what is still under way."""
        if self._flag is not None:
            self._flag[1].wait()
            self._flag = None


AT_ONCE = 30
"""Numbers that ranks of a node add up at once: the board has room for 32."""


def agreed_names(team: Team, step: Step, sums: Sums, more: Iterable[str] = ()) -> list[str]:
    """The names of what is reported besides loss and accuracy; all ranks call it.

    Where a step of the user's own tells none, those that the first rank has. `more`: those that
    every step may have.
    """
    names = list(step.names or ())
    if step.names is None and team.adds_up:
        names = list(parse_json(team.from_first(json.dumps(sorted(sums)), "the metrics' names")))
    return list(dict.fromkeys([*names, *more]))


def added_up(team: Team, names: Sequence[str], sums: Sums, what: str) -> Sums:
    """The sums under these names over all ranks; all ranks call it."""
    values = [value for name in names for value in sums.get(name, (0.0, 0.0))]
    found: list[float] = []
    for start in range(0, len(values), AT_ONCE):
        found += team.sum(values[start : start + AT_ONCE], what)
    return dict(zip(names, zip(found[::2], found[1::2], strict=True), strict=True))


def means_of(sums: Sums) -> dict[str, float | None]:
    """By name; None where nothing was counted.

    >>> means_of({"mae": (1.0, 4.0), "top5": (0.0, 0.0)})
    {'mae': 0.25, 'top5': None}
    """
    return {name: total / count if count else None for name, (total, count) in sums.items()}
