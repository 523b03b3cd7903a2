"""What each exchange costs: seconds and bytes for one agreement between nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.cost.split import Split
from paceline.cost.transfer import Wire, allreduce_bytes, allreduce_seconds
from paceline.errors import UnsupportedError

Kind = Literal["allreduce", "ring", "reduce_broadcast", "parameter_server", "averaging"]
KINDS: tuple[Kind, ...] = (
    "allreduce",
    "ring",
    "reduce_broadcast",
    "parameter_server",
    "averaging",
)
OVERLAPPING: frozenset[str] = frozenset(
    {"allreduce", "ring", "reduce_broadcast", "parameter_server"}
)
"""Exchanges that start while backward still runs, bucket by bucket."""
SEGMENT = 2**20
"""Bytes that reduce_broadcast sends back while the next ones arrive."""


@dataclass(frozen=True, kw_only=True)
class ExchangeCost:
    """How nodes agree, as the formulas see it."""

    kind: Kind = "allreduce"
    servers: int = 1
    """parameter_server: how many; each holds 1/servers of the weights."""
    dedicated: bool = True
    """parameter_server: servers are nodes of their own and compute nothing."""
    asynchronous: bool = False
    """parameter_server: each gradient is applied as it comes (not exact)."""
    every: int = 1
    """averaging: local steps between two averages (not exact)."""
    split: Split | None = None
    """Linear layers that are split by feature over the nodes; None: all weights are whole."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnsupportedError(f"exchange {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.servers < 1 or self.every < 1:
            raise UnsupportedError(
                f"servers = {self.servers} and every = {self.every} must be at least 1"
            )
        if self.split is not None and self.kind in ("parameter_server", "averaging"):
            raise UnsupportedError(
                f"split layers need an exchange that sums gradients, not {self.kind}"
            )

    def is_idle(self, workers: int) -> bool:
        """True when there is nobody to talk to; a lone worker still talks to its servers."""
        apart = self.kind == "parameter_server" and self.dedicated
        return workers <= 1 and not apart

    @property
    def exact(self) -> bool:
        """True when it gives the weights of one machine."""
        return not self.asynchronous and self.kind != "averaging"

    @property
    def name(self) -> str:
        """As tables show it."""
        if self.kind == "parameter_server":
            mode = "async" if self.asynchronous else "sync"
            return f"parameter_server {mode} x{self.servers}"
        if self.kind == "averaging":
            return f"averaging every {self.every}"
        return f"{self.kind}, split layers" if self.split is not None else self.kind


def agreement_seconds(exchange: ExchangeCost, wire: Wire, size: float, nodes: int) -> float:
    """Time to agree on `size` bytes, with nothing to hide behind.

    allreduce, averaging   2 a + 2 (N-1) o + 2 (N-1)/N n/B      (`allreduce_seconds`)
    ring                   2 (N-1) (a + o) + 2 (N-1)/N n/B
    reduce_broadcast       2 a + 2 (N-1) o + (N-1) (n + s)/B     the first node's link; the
                                                                 sum of a segment s goes back
                                                                 while the next one arrives
    parameter_server       2 (a + m o + v/B)                     a push and a pull, see
                                                                 `way_seconds`
    """
    if exchange.is_idle(nodes):
        return 0.0
    if exchange.kind == "ring":
        return allreduce_seconds(wire, size, nodes, "ring")
    if exchange.kind == "reduce_broadcast":
        moved = (nodes - 1) * (size + min(size, SEGMENT))
        return 2 * (wire.latency + (nodes - 1) * wire.message) + moved / wire.both
    if exchange.kind == "parameter_server":
        return 2 * way_seconds(exchange, wire, size, nodes)
    return allreduce_seconds(wire, size, nodes)


def way_seconds(exchange: ExchangeCost, wire: Wire, size: float, workers: int) -> float:
    """Time in which every worker pushes `size` bytes to the servers, or pulls them: a + m o + v/B.

    m is what the busiest node sends or takes, max(S, W) messages; v are `server_bytes`.
    """
    messages = max(server_count(exchange, workers), workers)
    rate = wire.bandwidth if exchange.dedicated else wire.both
    busiest = server_bytes(exchange, size, workers)
    return wire.latency + messages * wire.message + busiest / rate


def server_count(exchange: ExchangeCost, workers: int) -> int:
    """Servers that hold a part; beside the workers there is room for one per node."""
    return exchange.servers if exchange.dedicated else min(exchange.servers, workers)


def server_bytes(exchange: ExchangeCost, size: float, workers: int) -> float:
    """Bytes that the busiest link carries while every worker pushes (or pulls) once.

        dedicated       max(n, W n/S)                       a worker's link, a server's link
        beside workers  max((S-1)/S n, (W-1)/S n, n if S < W)

    A worker beside a server keeps its own part off the wire; a worker without one
    sends all of n. The busiest link grows with the workers: the more servers, the
    later that is felt. With S = W this is half of what an all-reduce moves.
    """
    servers = server_count(exchange, workers)
    if exchange.dedicated:
        return max(size, workers * size / servers)
    alone = size if servers < workers else 0.0
    return max((servers - 1) / servers * size, (workers - 1) / servers * size, alone)


def agreement_bytes(exchange: ExchangeCost, size: float, nodes: int) -> float:
    """Bytes that the busiest node sends for one agreement.

    allreduce, ring, averaging   2 (N-1)/N n
    reduce_broadcast             (N-1) n                the first node; every other one n
    parameter_server             push and pull of the busiest node
    """
    if exchange.is_idle(nodes):
        return 0.0
    if exchange.kind == "reduce_broadcast":
        return (nodes - 1) * size
    if exchange.kind == "parameter_server":
        servers = server_count(exchange, nodes)
        if exchange.dedicated:
            return max(size, nodes * size / servers)
        # A node with a server pushes the other parts and answers the other workers' pulls.
        return (servers - 1) / servers * size + (nodes - 1) / servers * size
    return allreduce_bytes(size, nodes)


def queueing_rates(
    workers: Sequence[tuple[float, int]], demand: float, stations: int
) -> list[float]:
    """Updates per second of asynchronous workers, per kind, all of a kind together.

    `workers` are (seconds away from the servers, how many). Each update passes `stations`
    equal links, which are shared fairly and take `demand` seconds each when alone. With X_c
    the rate and Q_c the number of messages of kind c at a link (Schweitzer's approximation
    of mean value analysis):

        R_c = demand (1 + sum_k Q_k - Q_c / N_c)     X_c = N_c / (Z_c + stations R_c)
        Q_c = X_c R_c

    repeated until it stands still. No rate exceeds 1 / demand in sum.
    """
    queues = [0.0] * len(workers)
    rates = [0.0] * len(workers)
    for _ in range(1000):
        total = math.fsum(queues)
        changed = 0.0
        for kind, (away, count) in enumerate(workers):
            stay = demand * (1 + total - queues[kind] / count)
            rates[kind] = count / (away + stations * stay)
            queue = rates[kind] * stay
            changed = max(changed, abs(queue - queues[kind]) / (queue or 1.0))
            queues[kind] = queue
        if changed < 1e-10:
            break
    # Heavy load converges slowly: what the links can carry at most is known.
    excess = math.fsum(rates) * demand
    return [rate / max(1.0, excess) for rate in rates]
