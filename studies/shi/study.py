"""All that was measured, by network, kind and number of workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from studies.shi.measures import Measured

KINDS = ("ring", "server", "ddp", "tf_ring", "tf_server")
TITLES = {
    "ring": "ring",
    "server": "parameter server",
    "ddp": "stock DDP",
    "tf_ring": "TensorFlow ring",
    "tf_server": "TensorFlow server",
    "alone": "one worker",
}


@dataclass(frozen=True, kw_only=True)
class Study:
    """Measurements, with the study's own table beside them."""

    published: Mapping[str, Any]
    measured: tuple[Measured, ...]

    @property
    def models(self) -> tuple[str, ...]:
        """Networks that have a step, in the study's order."""
        there = {each.model for each in self.measured}
        return tuple(model for model in self.published if model in there)

    def title(self, model: str) -> str:
        """The study's name of a network."""
        return str(self.published[model]["title"])

    def of(self, kind: str, model: str | None = None) -> tuple[Measured, ...]:
        """Measurements of a kind, by workers."""
        found = [
            each
            for each in self.measured
            if each.kind == kind and (model is None or each.model == model)
        ]
        return tuple(sorted(found, key=lambda each: each.workers))

    def one(self, model: str, kind: str, workers: int) -> Measured | None:
        """The measurement with these facts."""
        found = [each for each in self.of(kind, model) if each.workers == workers]
        return found[0] if found else None

    def workers(self, model: str) -> tuple[int, ...]:
        """Numbers of workers that a network has steps for."""
        return tuple(sorted({each.workers for each in self.measured if each.model == model}))

    def gradient(self, model: str) -> int | None:
        """Bytes of a gradient of a network, by any training of it."""
        sizes = [each.gradient for each in self.measured if each.model == model and each.gradient]
        return sizes[0] if sizes else None

    def speedup(self, measured: Measured) -> float | None:
        """Over one worker alone."""
        alone = self.one(measured.model, "alone", 1)
        if alone is None or not alone.speed or measured.speed is None:
            return None
        return measured.speed / alone.speed
