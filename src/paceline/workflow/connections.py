"""A node's connections to the others: all of them at the beginning, and those of every leg.

What a lost node would be waited for in ends at once: a sum of the leg, a proof, a rendezvous.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from paceline.cost.transfer import Wire, allreduce_bytes
from paceline.errors import LostError
from paceline.exchange.crew import Crew
from paceline.exchange.network import Network
from paceline.exchange.opening import open_late, open_network, open_part, open_watch_store
from paceline.schema import RankContext

PROBE_SECONDS = 0.1
"""A sum that takes so long tells what the network carries: far longer than it takes to begin."""
PROBE_BYTES = 2**24
"""No sum that is timed is larger: a network that is faster needs no exact figure."""


@dataclass
class Connections:
    """The networks of some of the nodes that this node has part in."""

    context: RankContext
    network: Network
    """Of all nodes."""
    crew: Crew
    deadline: float
    _parts: list[tuple[tuple[int, ...], Network]] = field(default_factory=list)

    def open(self, members: Sequence[int], name: str) -> Network:
        """A network of these nodes; every one of them calls it."""

        def hopeless() -> str:
            return "; ".join(self.crew.gone[each] for each in members if each in self.crew.gone)

        def keep(network: Network) -> None:
            self._parts.append((tuple(members), network))

        try:
            return open_part(
                self.context,
                self.network,
                members,
                name,
                hosts=[self.crew.hosts[member] for member in members],
                deadline=self.deadline,
                hopeless=hopeless,
                opened=keep,
            )
        except RuntimeError as error:
            if why := hopeless():
                raise LostError(why) from error
            raise

    def close(self, network: Network) -> None:
        self._parts = [part for part in self._parts if part[1] is not network]
        network.close()

    def end_waits_for(self, lost: int) -> None:
        """End whatever waits for a node, from another thread."""
        for members, network in list(self._parts):
            if lost in members:
                network.abort()


@contextlib.contextmanager
def joined(
    context: RankContext, hosts: Sequence[str], *, deadline: float, late: bool = False
) -> Iterator[tuple[Network, Crew]]:
    """The network of all nodes, and the crew that they are; `late`: the others train already."""
    network = (open_late if late else open_network)(context, hosts, deadline=deadline)
    try:
        store = open_watch_store(context, deadline=deadline)
        crew = Crew(store, context.node, list(hosts))
        try:
            yield network, crew
        finally:
            crew.close()
    finally:
        network.close()


def probe(network: Network) -> Wire:
    """What joins all nodes, by sums that took long enough to tell; all call it."""
    # The first sum also opens connections.
    latency = min(_summed(network, 4) for _ in range(2)) / 2
    size = 2**16
    while True:
        seconds = _summed(network, size)
        if seconds >= PROBE_SECONDS:  # is it the network, or a moment's hitch on one of the hosts?
            seconds = min(seconds, _summed(network, size))
        seconds = max(seconds - 2 * latency, 1e-9)
        if seconds >= PROBE_SECONDS or size >= PROBE_BYTES:
            carried = allreduce_bytes(size, network.size) / seconds
            return Wire(latency=latency, bandwidth=carried, both=carried, message=0.0)
        size *= 4


def _summed(network: Network, size: int) -> float:
    """Seconds of a sum of so many bytes, the same on all nodes: what the slowest took."""
    data = torch.zeros(size // 4)
    network.barrier("a look at the network")
    began = time.perf_counter()
    network.sum(data, "a look at the network").wait()
    own = [0.0] * network.size
    own[network.rank] = time.perf_counter() - began
    return max(network.total(own, "a look at the network"))
