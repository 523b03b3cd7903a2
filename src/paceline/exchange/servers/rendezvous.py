"""Where the workers and servers of one run find each other."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from typing import Any

from paceline.errors import WorkerError
from paceline.exchange.network import Traffic
from paceline.exchange.opening import gloo_group, open_store
from paceline.exchange.wire import Connection
from paceline.schema import RankContext
from paceline.schema.plain import ONE_LINE, checked, parse_json

MOST_NODES = 2**16
"""A number of a node above this is no node's."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A worker that came when training was already under way."""

    number: int
    """The how manieth, from 1."""
    node: int
    host: str


def read_arrival(number: int, text: bytes) -> Arrival:
    """An arrival from what a worker left in the store; WorkerError for anything else."""
    try:
        note = checked(parse_json(text), {"node": int, "host": ONE_LINE})
        if not 0 <= note["node"] < MOST_NODES:
            raise ValueError(f"{note['node']} is no node")
    except ValueError as error:
        raise WorkerError(f"arrival {number} in the run's store cannot be read: {error}") from None
    return Arrival(number=number, node=note["node"], host=note["host"])


class Rendezvous:
    """Connections of one process to others, each for one worker and one server.

    Over Gloo, a worker that starts under a number that was taken before, or that the
    plan does not have, is an arrival: servers look out for those while they serve.
    """

    def __init__(self, context: RankContext, *, deadline: float) -> None:
        self.context, self.deadline = context, deadline
        self._group: Any = None
        self._store: Any = None
        if context.backend == "mpi4py":
            from paceline.backends.mpi import open_group

            self._group = open_group(context.node, context.nodes, deadline)
        else:
            try:
                self._store = open_store(context, deadline=deadline)
            except RuntimeError as error:
                raise WorkerError(
                    f"nobody answers at {context.address}:{context.port}, where node 0 of the run"
                    " should listen: start node 0, or the run has ended"
                ) from error

    @property
    def takes_arrivals(self) -> bool:
        return self._store is not None

    def announce(self, node: int, host: str, planned: int) -> int:
        """A worker says that it is there; 0, or the number of its arrival if it came later."""
        if self._store is None:
            return 0
        if self._store.add(f"taken-{node}", 1) == 1 and node < planned:
            return 0
        number = int(self._store.add("arrivals", 1))
        self._store.set(f"arrival-{number}", json.dumps({"node": node, "host": host}))
        return number

    def arrival(self, number: int) -> Arrival | None:
        """The arrival of that number, if it has come; RuntimeError when the first node has left."""
        if not self._store.check([f"arrival-{number}"]):
            return None
        return read_arrival(number, self._store.get(f"arrival-{number}"))

    def link(
        self, server: int, worker: int, arrival: int, traffic: Traffic, *, patience: float
    ) -> Connection:
        """The connection of a server and a worker; both call it, whoever comes first waits."""
        serves = self.context.node == server
        if self._group is not None:
            return Connection(self._group, worker if serves else server, traffic, patience=patience)
        # A store of its own: a store serves one caller at a time, and this one may wait long.
        store = open_store(self.context, deadline=self.deadline, serves=False)
        other = 1 if serves else 0
        try:
            group, sealings = gloo_group(
                f"pair-{server}-{worker}-{arrival}",
                store,
                self.context,
                datetime.timedelta(seconds=max(patience, 30.0)),
                members=(1 - other, 2),
            )
        finally:
            store.close()
        return Connection(group, other, traffic, patience=patience, sealing=sealings[other])

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
        if self._store is not None:
            self._store.close()
        self._group = self._store = None
