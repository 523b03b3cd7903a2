"""How long bytes take between nodes: latency, bandwidth, and what a measured curve says."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import ConfigError
from paceline.schema.machines import ANY_HOST, AllReduceCurve, Level, Link, Machines, Measured

MESSAGE_SECONDS = 18e-6
"""Software time per message where none was measured: half an all-reduce of 1 KB between two
ranks of one machine over MPI, whose wire is memory (0.037 ms, docs/backends.md)."""
GOODPUT = (0.745, 0.83, 0.941)
"""Part of a described rate that training gets: slowest and fastest all-reduce of 16 MB seen in the
lab at 1 Gbit/s (180 and 161 ms, docs/backends.md), and what Ethernet, IP and TCP leave of 1538
bytes (1448)."""
Rounds = Literal["direct", "ring"]


@dataclass(frozen=True)
class Wire:
    """A link as the formulas see it; all nodes of a team are joined by equal ones."""

    latency: float
    """Seconds one way."""
    bandwidth: float
    """Bytes per second one way, alone."""
    both: float
    """Bytes per second each way while both are used, as collectives do."""
    message: float = MESSAGE_SECONDS
    """Seconds of software per message."""
    slowdown: float = 1.0
    """How many times as long communication takes while the cores compute."""
    taken: float = 0.0
    """Part of the cores' computing that communication takes while both are under way."""


def wire(link: Link, level: Level = "median") -> Wire:
    """A link at one level; `low` is the slow wire: low rates, high latency.

    What a link carries both ways at once, it carries one way alone: where less was measured, the
    measurement was disturbed.
    """
    opposite: dict[Level, Level] = {"low": "high", "high": "low", "median": "median"}
    ways = [link.forward.at(level)] + ([link.backward.at(level)] if link.backward else [])
    both = link.both.at(level) if link.both else min(ways)
    one_way = max(min(ways), both)
    if one_way <= 0 or both <= 0:
        raise ConfigError(
            f"the link {link.first} - {link.second} has a rate of 0: measure it again"
        )
    return Wire(latency=link.latency.at(opposite[level]), bandwidth=one_way, both=both)


def described_link(bits_per_second: float, latency: float) -> Link:
    """A link that someone described: its rate less what protocols take, as an interval."""
    low, median, high = (part * bits_per_second / 8 for part in GOODPUT)
    how = f"described as {bits_per_second / 1e6:g} Mbit/s, less protocols and software"
    return Link(
        latency=Measured(median=latency, low=latency, high=latency, samples=0, how="described"),
        forward=Measured(median=median, low=low, high=high, samples=0, how=how),
    )


def slowest_wire(machines: Machines, names: Sequence[str], level: Level = "median") -> Wire:
    """The wire that a team of hosts can count on: the worst of the links between them.

    A collective ends when its slowest link has carried its part, so the largest latency
    and the smallest rates hold for all. A link whose ends are `*` stands for any pair
    that has none of its own. An all-reduce curve of just these hosts replaces the rates.
    """
    known = {frozenset((link.first, link.second)): wire(link, level) for link in machines.links}
    default = known.get(frozenset((ANY_HOST,)))
    found = []
    for place, first in enumerate(names):
        for second in names[place + 1 :]:
            one = known.get(frozenset((first, second)), default)
            if one is None:
                raise ConfigError(
                    f"machines.json has no link between {first!r} and {second!r}: measure them"
                    " together, or describe the link"
                )
            found.append(one)
    if not found:
        return Wire(latency=0.0, bandwidth=math.inf, both=math.inf, message=0.0)
    worst = Wire(
        latency=max(one.latency for one in found),
        bandwidth=min(one.bandwidth for one in found),
        both=min(one.both for one in found),
    )
    curve = next((c for c in machines.curves if set(c.hosts) == set(names)), None)
    return worst if curve is None else fitted(worst, curve, level)


def allreduce_seconds(wire: Wire, size: float, nodes: int, rounds: Rounds = "direct") -> float:
    """Time of an all-reduce of `size` bytes.

        direct   2 a + 2 (N-1) o + 2 (N-1)/N n / B     two steps, N-1 messages each
        ring     2 (N-1) (a + o) + 2 (N-1)/N n / B     2 (N-1) steps, one message each

    a latency, o software per message, B bytes per second while both ways are used.
    """
    if nodes <= 1:
        return 0.0
    messages = 2 * (nodes - 1)
    steps = 2 if rounds == "direct" else messages
    return steps * wire.latency + messages * wire.message + allreduce_bytes(size, nodes) / wire.both


def allreduce_bytes(size: float, nodes: int) -> float:
    """Bytes that each node sends in an all-reduce, direct or ring: 2 (N-1)/N n."""
    return 2 * (nodes - 1) / nodes * size if nodes > 1 else 0.0


def fitted(start: Wire, curve: AllReduceCurve, level: Level = "median") -> Wire:
    """The wire whose all-reduce comes nearest to a measured curve.

    The measured time is t(n) = A + n s:

        s = median slope over all pairs of sizes (Theil and Sen)  B = 2 (N-1)/N / s
        A = median over all sizes of t(n) - n s, at least 0       o = (A - 2 a) / (2 (N-1))

    One size that was disturbed, a small one by a millisecond or the largest by a second, has no
    say in either. Latencies stay as they were measured. What computing and sums do to each other
    is taken from the curve too; see `hindrance`.
    """
    nodes = len(curve.hosts)
    times: dict[Level, Level] = {"low": "high", "high": "low", "median": "median"}
    points = [(p.bytes, p.seconds.at(times[level])) for p in curve.points if p.seconds.median > 0]
    if nodes < 2 or len({size for size, _ in points}) < 2:
        return start
    slope = statistics.median(
        (later - earlier) / (large - small)
        for (small, earlier), (large, later) in itertools.combinations(sorted(points), 2)
        if large > small
    )
    if slope <= 0:
        return start
    intercept = max(0.0, statistics.median(t - slope * n for n, t in points))
    rate = 2 * (nodes - 1) / nodes / slope
    return replace(
        start,
        latency=min(start.latency, intercept / 2),
        message=max(0.0, intercept - 2 * start.latency) / (2 * (nodes - 1)),
        both=rate,
        bandwidth=max(start.bandwidth, rate),
        **hindrance(curve, rate),
    )


def hindrance(curve: AllReduceCurve, rate: float) -> dict[str, float]:
    """How much computing and communicating slow each other down while both are under way.

        slowdown    time of a sum while all compute / while none does, at least 1
        taken       1 - computing left, at most 1 / slowdown

    The limit says that doing both at once is never slower than taking turns: what is
    measured beyond it is noise. Where computing was not measured beside sums, `taken` is
    what their processor time is of their time on one core: core seconds per byte x B.
    """
    slowdown = max(1.0, curve.slowdown.median) if curve.slowdown else 1.0
    if curve.computing_left is not None:
        taken = 1 - curve.computing_left.median
    else:
        taken = curve.cpu_per_byte.median * rate if curve.cpu_per_byte else 0.0
    return {"slowdown": slowdown, "taken": min(1 / slowdown, max(0.0, taken))}
