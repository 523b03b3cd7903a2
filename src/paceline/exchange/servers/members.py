"""Who pushes to a server, and which pushes make one update: no network, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.exchange.wire import Request


@dataclass
class Member:
    """One worker, seen from a server."""

    node: int
    host: str
    group: int
    clock: int = 0
    """Updates that it has pushed."""
    joined_at: int = -1
    """It takes part in sums of later updates than this."""
    pulled: int = 0
    """The version that it computes with."""
    expected: bool = True
    """Others wait for it; a worker that joins is expected from its first word on."""
    done: bool = False
    lost: bool = False
    gradient: Any = None

    @property
    def active(self) -> bool:
        return self.expected and not (self.done or self.lost)

    @property
    def name(self) -> str:
        return f"worker {self.node} on {self.host}"


@dataclass
class Round:
    """What a group of workers pushes for one update."""

    received: dict[int, Request] = field(default_factory=dict)
    applied: bool = False

    def is_complete(self, members: Iterable[Member], backup: int) -> bool:
        """True when at most `backup` of the group's active members are missing."""
        missing = sum(member.active and member.node not in self.received for member in members)
        return bool(self.received) and missing <= backup


def must_wait(member: Member, members: Iterable[Member], bound: int | None) -> bool:
    """Whether a member is too far ahead of the slowest to get its answer yet."""
    others = [other.clock for other in members if other.active and other is not member]
    return bound is not None and member.clock - min(others, default=member.clock) > bound
