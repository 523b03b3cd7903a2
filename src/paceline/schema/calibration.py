"""What past runs have taught about predictions, per exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.errors import ConfigError

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Factors by which predicted times are multiplied."""

    format: int = FORMAT
    made: str = ""
    factors: dict[str, float] = field(default_factory=dict)
    """By the exchange's name: measured time of an update over predicted time."""
    runs: dict[str, int] = field(default_factory=dict)
    """How many runs each factor stands on."""

    def __post_init__(self) -> None:
        for name, factor in self.factors.items():
            if not 0 < factor < math.inf:
                raise ConfigError(f"factors.{name} = {factor:g} must be above 0")


def calibration_name(
    kind: str, *, nodes: int, partition: bool = False, asynchronous: bool = False
) -> str:
    """Under which name past runs are compared: the exchange, and how it was used.

    >>> calibration_name("allreduce", nodes=2, partition=True)
    'allreduce + partition'
    """
    if nodes <= 1:
        return "alone"
    return kind + (" + partition" if partition else "") + (" async" if asynchronous else "")
