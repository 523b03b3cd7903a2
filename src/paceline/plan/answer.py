"""What is asked of `predict`, and what it answers: frozen data, ready for JSON and plots."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.schema import ExchangeSettings
from paceline.schema.machines import Link, WorkloadFacts


@dataclass(frozen=True, kw_only=True)
class Question:
    """What somebody wants to know."""

    nodes: tuple[int, ...]
    link: Link
    mix: tuple[float, ...] = (1.0,)
    """Speeds of the nodes against the measured host, repeated as often as needed."""
    price: float | None = None
    """Per node and hour."""
    purchase: float | None = None
    """Per node, once."""
    currency: str = ""
    exchange: ExchangeSettings = field(default_factory=ExchangeSettings)
    """What the configuration says of how nodes agree."""

    def __post_init__(self) -> None:
        if not self.nodes or min(self.nodes) < 1:
            raise ConfigError(f"--nodes {list(self.nodes)} must be whole numbers of at least 1")
        if not self.mix or any(not 0 < speed < math.inf for speed in self.mix):
            raise ConfigError(f"--mix {list(self.mix)} must be speeds above 0, such as 1,1/21")
        for price in (self.price, self.purchase):
            if price is not None and not 0 <= price < math.inf:
                raise ConfigError(f"--price {price} must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One exchange on so many nodes."""

    nodes: int
    exchange: str
    exact: bool
    batch: int
    images_per_second: float
    low: float
    high: float
    """The interval that the spread of what was measured gives."""
    speedup: float
    speedup_low: float
    speedup_high: float
    """Against the fastest of the nodes alone."""
    efficiency: float
    """Part of what all nodes' speeds add up to."""
    step_seconds: float
    terms: dict[str, float]
    """Seconds per step: compute, exposed, waiting, data; they add up."""
    bytes_sent: float
    """Per step, by the busiest node."""
    memory_mb: float
    """Of the node that needs most."""
    fits: bool
    idle: int
    """Nodes for which the batch has no sample left."""
    staleness: float
    epoch_seconds: float
    end_seconds: float
    epoch_cost: float | None
    end_cost: float | None
    reason: str
    """What the time goes to beside computing."""


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """From where on several nodes are as fast as one; None: nowhere."""

    nodes: int
    """Nodes that link and batch are given for."""
    link_bits_per_second: float | None
    batch: int | None
    node_count: int | None
    """The fewest nodes that beat one, with the given link and batch."""
    fastest_nodes: int
    """Of the numbers asked for, the one with most images per second."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The answer: a table, where it turns, and one sentence."""

    workload: WorkloadFacts
    host: str
    question: Question
    rows: tuple[Row, ...]
    break_even: BreakEven | None
    worth_it: bool
    verdict: str
    answer: tuple[str, ...] = ()
    """For people who never heard of an exchange: what one more machine brings and costs."""
    notes: tuple[str, ...] = field(default=())
