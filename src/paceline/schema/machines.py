"""machines.json: what each host is, how fast it trains a workload, and what joins the hosts.

Every measured number is a `Measured`: its median, its quartiles and how it was taken,
so that a prediction can state an interval and a person can judge it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.errors import ConfigError
from paceline.schema.codec import rule
from paceline.schema.plan import NodePlan

FORMAT = 1
BUSY = 0.15
"""Part of the cores in use by other programs above which times are doubtful."""
Level = Literal["median", "low", "high"]
"""Which of a figure's numbers is meant."""
ANY_HOST = "*"
"""In a link: every host, where all links are alike."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured number."""

    median: float = rule(minimum=0.0)
    low: float = rule(minimum=0.0)
    high: float = rule(minimum=0.0)
    """Quartiles of what was measured; for one sample, that sample."""
    samples: int = rule(default=1, minimum=0)
    """How many measurements it stands on; 0: it was described, not measured."""
    how: str = ""
    """How it was taken, in a few words."""

    def __post_init__(self) -> None:
        if not self.low <= self.median <= self.high:
            raise ConfigError(
                f"a figure's median {self.median:g} must lie between its quartiles"
                f" {self.low:g} and {self.high:g}"
            )

    @property
    def spread(self) -> float:
        """(high - low) / median; 0 for a median of 0."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def at(self, level: Level) -> float:
        """One of the three numbers, by its name."""
        return {"median": self.median, "low": self.low, "high": self.high}[level]


def exactly(value: float, how: str = "") -> Measured:
    """A figure without spread.

    >>> exactly(0.2).spread
    0.0
    """
    return Measured(median=value, low=value, high=value, samples=1, how=how)


@dataclass(frozen=True, kw_only=True)
class UpdateTime:
    """How long one update takes at one batch size."""

    batch_size: int = rule(minimum=1)
    seconds: Measured


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of the model on one host, timed at the host's `layer_batch`."""

    name: str
    kind: str = ""
    """The module's class, such as Linear or Conv2d."""
    forward: Measured = field(default_factory=lambda: exactly(0.0))
    backward: Measured = field(default_factory=lambda: exactly(0.0))
    """Seconds for the whole of `layer_batch`."""
    parameter_bytes: int = rule(default=0, minimum=0)
    input_bytes: int = rule(default=0, minimum=0)
    activation_bytes: int = rule(default=0, minimum=0)
    """What goes in and what comes out, per sample."""


@dataclass(frozen=True, kw_only=True)
class MeasuredHost:
    """One node: what it is, and how fast it trains the workload."""

    name: str
    processor: str = ""
    machine: str = ""
    """The physical machine, where known; hosts are never assumed to share one."""
    visible_cores: int = rule(default=1, minimum=1)
    usable_cores: int = rule(default=1, minimum=1)
    """What affinity and quota leave."""
    quota: float | None = None
    """Cores' worth of time that the cgroup allows; None: no limit."""
    busy: float = 0.0
    """Part of the cores that other programs used while it was measured."""
    memory_mb: float = rule(default=0.0, minimum=0.0)
    free_mb: float = rule(default=0.0, minimum=0.0)
    """0 where it is not known."""
    memory_bandwidth: Measured | None = None
    """Bytes per second that the cores copy."""
    node: NodePlan = field(default_factory=NodePlan)
    """The local strategy that won the race here."""
    precision: str = "fp32"
    memory_format: str = "contiguous"
    updates: tuple[UpdateTime, ...] = ()
    """Seconds per update at a few batch sizes, by that strategy."""
    layers: tuple[Layer, ...] = ()
    """In the order in which forward runs them."""
    layer_batch: int = rule(default=1, minimum=1)
    feed: Measured | None = None
    """Samples per second that reading and decoding give."""
    warnings: tuple[str, ...] = ()

    @property
    def is_doubtful(self) -> bool:
        """Whether other programs used so much of it that its times say little."""
        return self.busy > BUSY


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins two hosts, or with `*` any two."""

    first: str = ANY_HOST
    second: str = ANY_HOST
    latency: Measured
    """Seconds that a small message takes one way."""
    forward: Measured
    """Bytes per second from first to second."""
    backward: Measured | None = None
    """Bytes per second from second to first; None: as forward."""
    both: Measured | None = None
    """Bytes per second each way while both are used; None: as one way alone."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One size of an all-reduce."""

    bytes: int = rule(minimum=0)
    seconds: Measured


@dataclass(frozen=True, kw_only=True)
class AllReduceCurve:
    """How long an all-reduce takes, by size, over one backend."""

    backend: str
    hosts: tuple[str, ...]
    points: tuple[CurvePoint, ...]
    cpu_per_byte: Measured | None = None
    """Core seconds that a host spends per byte it sends."""
    slowdown: Measured | None = None
    """How many times as long a sum takes while every host computes."""
    computing_left: Measured | None = None
    """Part of its speed at which the host that suffers most computes while sums are under way."""


@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """A linear layer that can be split over nodes, as far as bytes are concerned."""

    name: str
    inputs: int = rule(minimum=1)
    outputs: int = rule(minimum=1)
    bias: bool = True
    rows: int = rule(default=1, minimum=1)
    """Rows per sample (tokens of a sequence); 1 for flat features."""

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """What planning has to know of a workload beside its layers."""

    name: str = ""
    batch_size: int = rule(default=128, minimum=1)
    batch_per_worker: int | None = rule(default=None, minimum=1)
    """Weak scaling: the global batch grows with the nodes."""
    samples: int = rule(default=1, minimum=1)
    """Samples per epoch."""
    epochs: int = rule(default=1, minimum=1)
    steps: int | None = rule(default=None, minimum=1)
    """Stop after this many updates, whatever `epochs` says."""
    optimizer_slots: int = rule(default=0, minimum=0)
    """Numbers that the optimizer keeps per weight."""
    sample_bytes: int = rule(default=0, minimum=0)
    chains: tuple[tuple[LinearLayer, ...], ...] = ()
    """Linear layers that may be split, those together that nothing but elementwise layers part."""
    local_batch_norm: bool = False
    """Every node's BatchNorm sees its own samples only, as `numerics.allow` permits."""

    def batch(self, workers: int) -> int:
        """Samples per update over all workers."""
        if self.batch_per_worker is not None:
            return self.batch_per_worker * workers
        return self.batch_size


@dataclass(frozen=True, kw_only=True)
class Machines:
    """All hosts and what joins them, measured for one workload."""

    format: int = FORMAT
    made: str = ""
    workload: WorkloadFacts = field(default_factory=WorkloadFacts)
    hosts: tuple[MeasuredHost, ...] = ()
    links: tuple[Link, ...] = ()
    curves: tuple[AllReduceCurve, ...] = ()
    warnings: tuple[str, ...] = ()

    def host(self, name: str) -> MeasuredHost:
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts) or "none"
        raise ConfigError(f"host {name!r} is not in machines.json, which has: {known}")
