"""What a bench runs on every host, and what comes back: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.schema import Plan


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One thing to time: the same on every host."""

    name: str
    kind: str = "plan"
    """"plan": as the plan says; "ddp": stock DistributedDataParallel over Gloo; "alone": every host
    by itself on its share of the plan, all at the same time."""
    settings: dict[str, object] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    warmup: int = 1
    updates: int = 3
    rounds: int | None = None
    """Take part in only so many of the bench's rounds; None: in all."""
    settle: int = 0
    """Turns before the first round, after each of which shares follow the measured speeds, as
    between the epochs of a training; not for plans with servers."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Trials that take turns, several rounds of all of them."""

    trials: tuple[Trial, ...]
    rounds: int = 3
    hosts: tuple[str, ...] = ()
    deadline: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One round of one trial on one host."""

    trial: str
    round: int
    host: str
    seconds: float
    """Per update, from the moment when all were ready to the moment when all were done."""
    samples: int
    """Of this host, per update."""
    bytes_sent: float = 0.0
    """Per update, as the exchange counts them."""
    kernel_bytes_sent: float = 0.0
    """Per update, as the interface of the host counts them, headers included."""
    packets_sent: float = 0.0
    packets_received: float = 0.0
    waited: float = 0.0
    """Seconds per update in which computing stood still for the network."""
    processor: float = 0.0
    """Seconds per update that the host's process used a core, the network's threads included."""
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """All rounds of all trials on one host."""

    timings: tuple[Timing, ...] = ()
