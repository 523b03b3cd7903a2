"""Measurements side by side: interleaved in one run, medians with spread, ratios of medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Seconds per update, one number per round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Distance between the slowest and the fastest round, relative to the median."""
        return (max(self.rounds) - min(self.rounds)) / self.median


def interleave(
    contenders: Mapping[str, Callable[[], float]],
    rounds: int,
    say: Callable[[str], None] = print,
    settled: Callable[[Mapping[str, Sequence[float]]], bool] = lambda seconds: False,
) -> dict[str, Measured]:
    """Call every contender once per round, in turn, so that noise hits all alike.

    At most `rounds` times: no more once `settled` says so of the seconds seen.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, contender in contenders.items():
            seconds[name].append(contender())
            say(f"  round {number + 1}/{rounds}  {name}: {seconds[name][-1] * 1000:.2f} ms")
        if settled(seconds):
            break
    return {name: Measured(tuple(values)) for name, values in seconds.items()}
