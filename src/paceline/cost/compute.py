"""How long a node computes for its share, and which shares make all nodes ready together."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from paceline.errors import ConfigError
from paceline.schema.machines import Level, MeasuredHost

QUARTILES_OF_A_NORMAL = 1.349
"""Distance between the quartiles of a normal distribution, in standard deviations."""


@dataclass(frozen=True)
class UpdateCurve:
    """Seconds per update by batch size, as a broken line through what was measured.

        t(0) = 0
        t(b) = t_k + (b - b_k) (t_k+1 - t_k) / (b_k+1 - b_k)    b_k <= b <= b_k+1
        t(b) = the first or last segment made longer             outside

    Below the first point the line meets the axis at `fixed`, the part of an update
    that no smaller batch saves (optimizer, gradients, the interpreter); `fixed` is
    kept between 0 and the first time. With one point alone t is proportional to b.
    Times that fall as the batch grows are noise: they are raised to the ones before.
    """

    points: tuple[tuple[float, float], ...]

    @property
    def fixed(self) -> float:
        """Seconds of an update that do not depend on its batch."""
        (first, start) = self.points[0]
        if len(self.points) == 1:
            return 0.0
        (second, end) = self.points[1]
        slope = (end - start) / (second - first)
        return min(start, max(0.0, start - slope * first))

    def seconds(self, samples: float) -> float:
        """Seconds for an update of `samples`; nothing is done for none."""
        if samples <= 0:
            return 0.0
        (first, start) = self.points[0]
        if samples <= first:
            return self.fixed + (start - self.fixed) * samples / first
        place = bisect.bisect_left(self.points, (samples, 0.0))
        if place >= len(self.points):
            return self.points[-1][1] + (samples - self.points[-1][0]) * self._last_slope
        (left, before), (right, after) = self.points[place - 1], self.points[place]
        return before + (after - before) * (samples - left) / (right - left)

    @property
    def _last_slope(self) -> float:
        (last, end) = self.points[-1]
        if len(self.points) == 1:
            return end / last
        # Over the whole line, not the last segment: where that one is flat by noise,
        # a large batch would cost nothing.
        (first, start) = self.points[0]
        return (end - start) / (last - first) or end / last

    def samples_in(self, seconds: float) -> float:
        """The largest batch whose update takes at most `seconds`: the inverse of `seconds`."""
        (first, start) = self.points[0]
        if seconds < start:
            rest = start - self.fixed
            return max(0.0, (seconds - self.fixed) / rest * first) if rest > 0 else 0.0
        for (left, before), (right, after) in zip(self.points, self.points[1:], strict=False):
            if seconds < after:
                return left + (right - left) * (seconds - before) / (after - before)
        (last, end) = self.points[-1]
        return last + (seconds - end) / self._last_slope

    def slower(self, factor: float) -> UpdateCurve:
        """The curve of a host that takes `factor` times as long for everything."""
        return UpdateCurve(tuple((size, factor * time) for size, time in self.points))


def update_curve(points: Sequence[tuple[float, float]]) -> UpdateCurve:
    """The curve through (batch size, seconds), in any order.

    >>> update_curve([(64, 0.3), (32, 0.2)]).seconds(48)
    0.25
    >>> round(update_curve([(64, 0.3), (32, 0.2)]).fixed, 6)
    0.1
    """
    if not points or any(size <= 0 or time <= 0 for size, time in points):
        raise ConfigError(
            f"the times per update {list(points)} must be (batch size, seconds), both above 0:"
            " measure again"
        )
    times: dict[float, float] = {}
    highest = 0.0
    for size, time in sorted(points):
        highest = max(highest, time)
        times[size] = highest
    return UpdateCurve(tuple(times.items()))


def host_curve(host: MeasuredHost, level: Level = "median") -> UpdateCurve:
    """A host's curve at one level of its figures (`low`: fast, `high`: slow)."""
    if not host.updates:
        raise ConfigError(
            f"host {host.name!r} has no times per update in machines.json: measure it again"
        )
    return update_curve([(u.batch_size, u.seconds.at(level)) for u in host.updates])


def deviation(host: MeasuredHost) -> float:
    """Standard deviation of a host's update in parts of its time: quartile distance / 1.349."""
    spreads = sorted(update.seconds.spread for update in host.updates)
    return spreads[len(spreads) // 2] / QUARTILES_OF_A_NORMAL if spreads else 0.0


def expected_maximum(count: int) -> float:
    """How far the largest of `count` normal numbers lies above their mean, in deviations.

        z(N) = Phi^-1((N - 0.375) / (N + 0.25))    (Blom)

    >>> expected_maximum(1), round(expected_maximum(64), 2)
    (0.0, 2.34)
    """
    if count <= 1:
        return 0.0
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


@dataclass(frozen=True)
class Portion:
    """`count` nodes of one kind, each with `samples` of every batch."""

    kind: int
    """Which of the given kinds of node."""
    count: int
    samples: int


def shares(kinds: Sequence[tuple[UpdateCurve, int]], batch: int) -> list[Portion]:
    """Whole samples per node so that the slowest node is as fast as can be.

    `kinds` are (curve, how many nodes have it), so that thousands of equal nodes cost
    no more than one. The time T at which all are ready solves

        sum_i count_i floor(samples_in_i(T)) >= batch

    by bisection; the surplus is taken from the nodes that are the last to be ready.

    >>> fast, slow = update_curve([(40, 1.0)]), update_curve([(10, 1.0)])
    >>> [(p.count, p.samples) for p in shares([(fast, 1), (slow, 1)], 100)]
    [(1, 80), (1, 20)]
    """
    if batch < 1 or not kinds or any(count < 1 for _, count in kinds):
        raise ConfigError(f"a batch of {batch} over {len(kinds)} kinds of node cannot be shared")

    def taken(limit: float) -> list[int]:
        return [int(curve.samples_in(limit) + 1e-9) for curve, _ in kinds]

    def enough(limit: float) -> bool:
        sizes = taken(limit)
        return sum(size * count for size, (_, count) in zip(sizes, kinds, strict=True)) >= batch

    low, high = 0.0, max(curve.seconds(batch) for curve, _ in kinds)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    sizes = taken(high)
    surplus = sum(n * count for n, (_, count) in zip(sizes, kinds, strict=True)) - batch
    return _without_surplus(kinds, sizes, surplus)


def _without_surplus(
    kinds: Sequence[tuple[UpdateCurve, int]], sizes: list[int], surplus: int
) -> list[Portion]:
    """Take one sample each from the nodes that finish last until the batch is met."""
    fewer = [0] * len(kinds)
    while surplus > 0:
        times = [curve.seconds(size) for (curve, _), size in zip(kinds, sizes, strict=True)]
        last = max((i for i in range(len(kinds)) if sizes[i] > 0), key=lambda i: times[i])
        count = kinds[last][1]
        if surplus >= count:
            sizes[last] -= 1
            surplus -= count
        else:
            fewer[last], surplus = surplus, 0
    found = []
    for kind, (_, count) in enumerate(kinds):
        if count > fewer[kind]:
            found.append(Portion(kind, count - fewer[kind], sizes[kind]))
        if fewer[kind]:
            found.append(Portion(kind, fewer[kind], sizes[kind] - 1))
    return found
