"""Which batches the loop is working on, of those that loaders have handed out."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.errors import ConfigError

Part = tuple[float, float]
"""Samples of this rank's part of a batch, and of the whole batch."""


class Working:
    """The batches that loaders have handed out and that the loop is working on."""

    def __init__(self, waited: Callable[[float, float], None]) -> None:
        self.waited = waited
        """Told when a batch was asked for, and how many seconds it took to come."""
        self.parts: dict[int, Part] = {}
        self.handed = 0
        """How many there were so far."""
        self.since = time.perf_counter()
        """When the newest was handed out."""

    def part(self) -> Part | None:
        """Of the batch that is being worked on; None where there is none."""
        found = set(self.parts.values())
        if len(found) > 1:
            raise ConfigError(
                "several loaders have handed out batches of different sizes: say by what the loss"
                " is a mean, as pace.backward(loss, weight=len(inputs))"
            )
        return next(iter(found), None)
