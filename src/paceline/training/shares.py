"""Shares: how much of each global batch a node takes, and when that changes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from paceline.schema import Plan

DRIFT = 0.05
"""Shares follow the measured speeds when one of them is off by more than this part of itself, or
when waiting for the slowest node takes more than this part of an update."""
WINDOW = 8
"""Updates whose median tells a node's speed: a hitch of three of them does not."""


def worker_shares(plan: Plan, shares: Sequence[float], *, by_rank: bool = False) -> list[float]:
    """Every worker's (or rank's) part: its node's share, divided equally inside the node."""
    result: list[float] = []
    for node, share in zip(plan.nodes, shares, strict=True):
        count = node.ranks if by_rank else node.workers
        result += [share / count] * count
    return result


def rebalanced(shares: Sequence[float], speeds: Sequence[float]) -> list[float] | None:
    """Shares in proportion to speeds, or None where they are close enough already.

    A node without a share was left out on purpose and stays out. Half of the way is gone at once:
    a node's speed depends on its share, and one epoch is one noisy measurement.

    >>> rebalanced([0.5, 0.5], [300.0, 100.0])
    [0.625, 0.375]
    >>> rebalanced([0.75, 0.25], [300.0, 101.0]) is None
    True
    >>> rebalanced([1.0, 0.0], [300.0, 0.0]) is None
    True
    """
    total = sum(shares)
    taking = [speed if share > 0 else 0.0 for share, speed in zip(shares, speeds, strict=True)]
    if sum(taking) <= 0 or any(s > 0 and t <= 0 for s, t in zip(shares, taking, strict=True)):
        return None
    old = [share / total for share in shares]
    fair = [speed / sum(taking) for speed in taking]
    drift = max(abs(f - o) / o for f, o in zip(fair, old, strict=True) if o > 0)
    if drift <= DRIFT:
        return None
    return [(o + f) / 2 for o, f in zip(old, fair, strict=True)]


def fairer_shares(
    shares: Sequence[float], took: Sequence[Sequence[float]], fewest: int = WINDOW
) -> list[float] | None:
    """Shares with which nodes are ready together, or None where waiting is short, or noise.

    `took`: seconds of each node in updates one after the other, of which at least `fewest` must be
    there. Nodes wait for the slowest; with shares in proportion to their speeds nobody would.

    >>> fairer_shares([0.5, 0.5], [[1.0, 3.0]] * 8)
    [0.75, 0.25]
    >>> fairer_shares([0.5, 0.5], [[1.0, 1.08]] * 8) is None
    True
    >>> fairer_shares([0.5, 0.5], [[1.0, 3.0]] * 7) is None
    True
    """
    newest = took[-WINDOW:]
    if len(newest) < fewest:
        return None
    taking = [number for number, share in enumerate(shares) if share > 0]
    middles, errors = [], []
    for number in taking:
        seconds = [update[number] for update in newest]
        middle = statistics.median(seconds)
        spread = statistics.median(abs(each - middle) for each in seconds)
        middles.append(middle)
        errors.append(spread / middle if middle > 0 else 1.0)
    if len(taking) < 2 or min(middles) <= 0:
        return None
    total = sum(shares[number] for number in taking)
    speeds = [shares[n] / total / middle for n, middle in zip(taking, middles, strict=True)]
    waiting = 1 - 1 / sum(speeds) / max(middles)
    if waiting <= DRIFT + max(errors):
        return None
    fair = dict(zip(taking, speeds, strict=True))
    return [fair.get(number, 0.0) / sum(speeds) for number in range(len(shares))]


def describe_shares(plan: Plan, shares: Sequence[float]) -> str:
    """One line on who takes how much from now on."""
    parts = ", ".join(
        f"{node.host} {share / sum(shares):.1%}"
        for node, share in zip(plan.nodes, shares, strict=True)
    )
    return f"shares follow the measured speeds: {parts}"
