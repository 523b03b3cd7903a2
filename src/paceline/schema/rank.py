"""Where a rank stands: the only thing a worker knows about its surroundings."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """A rank's place among all ranks.

    Ranks are numbered node by node, and inside a node replica by replica:
    `local_rank = replica * stages + stage`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    """Where the first rank listens."""
    port: int = 0
    backend: str = "gloo"
    secret: str = field(default="", repr=False)
    """By which nodes of one run prove to each other that they belong to it."""

    @property
    def is_leader(self) -> bool:
        """True on the rank of each node that talks to the other nodes."""
        return self.local_rank == 0

    @property
    def is_first(self) -> bool:
        """True on the rank that talks to the user and writes what all share."""
        return self.rank == 0

    def replica(self, stages: int) -> int:
        """Which copy of the model this rank works on, inside its node."""
        return self.local_rank // stages

    def stage(self, stages: int) -> int:
        """Which part of the model this rank works on."""
        return self.local_rank % stages
