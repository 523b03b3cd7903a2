"""What a race found: every trial, its times, its spread and why it stopped."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.schema.plan import NodePlan

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to use a machine, and how fast it was."""

    name: str
    node: NodePlan = field(default_factory=NodePlan)
    precision: str = "fp32"
    memory_format: str = "contiguous"
    images_per_second: float | None = None
    """Median over the timed steps; None when it never ran to a time."""
    low: float | None = None
    high: float | None = None
    """Quartiles of the timed steps."""
    error: float | None = None
    """Standard error of its speed over its turns, as a part of it; None after a single turn."""
    trials: int = 0
    speedup: float | None = None
    """Against `sequential` at fp32 in the same race."""
    memory_mb: float | None = None
    """Largest resident memory of all its processes together, measured."""
    estimated_mb: float | None = None
    """What was expected before it was tried."""
    exact: bool = True
    out: bool = False
    """Fast or not, it gave other weights than one process: `reason` says which and why."""
    chosen: bool = False
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Race:
    """A whole race."""

    format: int = FORMAT
    fingerprint: str = ""
    workload: str = ""
    batch_size: int = 0
    cores: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    """Part of the cores that other programs used before the race."""
    warnings: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    gradient_mb: float = 0.0
    """What the gradients of all weights take."""
    decision: str = ""
    made: str = ""
    """When it was run."""
