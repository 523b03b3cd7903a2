"""How parameters are divided among servers: pure arithmetic.

The parameters of a model are laid end to end and cut into one contiguous shard per
server, all of the same size, so that no server is the bottleneck because of a large
layer. A parameter that lies across a cut is served in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LINE = 16
"""Elements of a cache line: cuts lie on multiples of it."""


@dataclass(frozen=True)
class Slice:
    """Part of one parameter, in its memory order."""

    parameter: int
    start: int
    end: int


def shard_bounds(elements: int, servers: int) -> list[tuple[int, int]]:
    """First element and end of every server's shard.

    >>> shard_bounds(100, 2)
    [(0, 48), (48, 100)]
    >>> shard_bounds(10, 1)
    [(0, 10)]
    """
    cuts = [round(elements * number / servers / LINE) * LINE for number in range(servers)]
    return list(zip(cuts, [*cuts[1:], elements], strict=True))


def slices(sizes: Sequence[int], start: int, end: int) -> list[Slice]:
    """The parts of parameters of these sizes that lie between two elements.

    >>> slices([40, 60], 32, 50)
    [Slice(parameter=0, start=32, end=40), Slice(parameter=1, start=0, end=10)]
    """
    found = []
    at = 0
    for number, size in enumerate(sizes):
        first, last = max(at, start), min(at + size, end)
        if first < last:
            found.append(Slice(number, first - at, last - at))
        at += size
    return found


def cut(spans: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """What of each span lies between two elements, in their order; nothing is left out.

    >>> cut([(10, 16), (0, 10)], 4, 12)
    [(10, 12), (4, 10)]
    """
    found = [(max(first, start), min(last, end)) for first, last in spans]
    return [(first, last) for first, last in found if first < last]
