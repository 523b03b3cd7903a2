"""Which ways of using a machine are worth a trial. Pure: cores and sizes in, candidates out."""

from __future__ import annotations

import math
from typing import Literal

from paceline.schema import Candidate, NodePlan, Numerics

MICRO_BATCHES = (4, 1, 2, 8)
"""The likeliest first: where it is far behind, the others need no trial."""
MAX_STAGES = 4
SAME = 0.02
"""Differences of speed below this are no differences: the simpler one is chosen."""
NEARLY, UNCLEAR = 0.03, 0.06
"""Nor are larger ones, up to these, that may be noise of their race (`is_near`, `is_level`)."""
LITTLE = 0.2
"""Who moves less than this part of another's data between the cores comes first of the two."""
Precision = Literal["fp32", "bf16"]
MemoryFormat = Literal["contiguous", "channels_last"]


def is_near(entry: Candidate, best: Candidate) -> bool:
    """Whether an entry is behind the best by no more than the standard error of that.

    >>> node = NodePlan()
    >>> best = Candidate(name="a", node=node, images_per_second=100.0, error=0.02)
    >>> is_near(Candidate(name="b", node=node, images_per_second=97.4, error=0.02), best)
    True
    >>> is_near(Candidate(name="b", node=node, images_per_second=97.4), best)
    False
    """
    return part_behind(entry, best) <= max(SAME, min(_noise(entry, best), NEARLY))


def is_level(entry: Candidate, other: Candidate) -> bool:
    """Whether a race does not tell that an entry is slower: not by more than its own noise.

    >>> node = NodePlan()
    >>> other = Candidate(name="a", node=node, images_per_second=100.0, error=0.01)
    >>> is_level(Candidate(name="b", node=node, images_per_second=96.0, error=0.02), other)
    True
    >>> is_level(Candidate(name="b", node=node, images_per_second=96.0, error=0.005), other)
    False
    """
    return part_behind(entry, other) <= max(SAME, min(2 * _noise(entry, other), UNCLEAR))


def is_calmer(entry: Candidate, other: Candidate) -> bool:
    """Whether far less goes between the cores: it loses less when these come to lie further apart.

    >>> node = NodePlan()
    >>> little = Candidate(name="a", node=node, crossing_mb=5.6)
    >>> is_calmer(little, Candidate(name="b", node=node, crossing_mb=38.4))
    True
    >>> is_calmer(little, Candidate(name="b", node=node, crossing_mb=8.0))
    False
    """
    if entry.crossing_mb is None or other.crossing_mb is None:
        return False
    return entry.crossing_mb < LITTLE * other.crossing_mb


def structures(
    cores: int, batch_size: int, *, elementwise: bool, many: bool = True
) -> list[NodePlan]:
    """Every way to divide a node's cores, `sequential` first, simple ones before clever ones.

    `many` is False where only one process can be used (objects that cannot be named).
    """
    plans = [NodePlan(strategy="sequential")]
    plans += [NodePlan(strategy="threads", threads=t) for t in _thread_counts(cores)]
    parts = [p for p in _divisors(cores) if 1 < p <= batch_size]
    plans += [NodePlan(strategy="replicas", replicas=p, threads=cores // p) for p in parts]
    if not many:
        return plans
    sync: Literal["shared", "ddp"] = "shared" if elementwise else "ddp"
    plans += [
        NodePlan(strategy="processes", processes=p, threads=cores // p, sync=sync) for p in parts
    ]
    if not elementwise:
        return plans
    for stages in (s for s in _divisors(cores) if 1 < s <= MAX_STAGES):
        plans += [
            NodePlan(strategy="pipeline", stages=stages, threads=cores // stages, micro_batches=m)
            for m in MICRO_BATCHES
            if m <= batch_size
        ]
        replicas = cores // stages
        if replicas > 1:
            plans += [
                NodePlan(strategy="hybrid", replicas=replicas, stages=stages, micro_batches=m)
                for m in MICRO_BATCHES
                if m > 1 and m * replicas <= batch_size
            ]
    return plans


def variants(numerics: Numerics, *, images: bool) -> list[tuple[Precision, MemoryFormat]]:
    """Precisions and layouts to try, the plain one first; layouts matter for images only."""
    precisions: tuple[Precision, ...] = (
        ("fp32", "bf16") if numerics.precision == "auto" else (numerics.precision,)
    )
    formats: tuple[MemoryFormat, ...] = (
        (("contiguous", "channels_last") if images else ("contiguous",))
        if numerics.memory_format == "auto"
        else (numerics.memory_format,)
    )
    return [(p, f) for p in precisions for f in formats]


def candidate(
    node: NodePlan, precision: str = "fp32", memory_format: str = "contiguous"
) -> Candidate:
    """A candidate with the name that tables show.

    >>> candidate(NodePlan(strategy="processes", processes=2), "bf16", "channels_last").name
    'processes 2x1, channels_last, bf16'
    """
    words = [describe(node)]
    if memory_format != "contiguous":
        words.append(memory_format)
    if precision != "fp32":
        words.append(precision)
    return Candidate(
        name=", ".join(words),
        node=node,
        precision=precision,
        memory_format=memory_format,
        exact=precision == "fp32",
    )


def describe(node: NodePlan) -> str:
    """A node plan in a few words."""
    if node.strategy == "threads":
        return f"threads {node.threads}"
    if node.strategy == "replicas":
        return f"replicas {node.replicas}x{node.threads}"
    if node.strategy in ("processes", "hogwild"):
        ddp = " (ddp)" if node.sync == "ddp" and node.strategy == "processes" else ""
        return f"{node.strategy} {node.processes}x{node.threads}{ddp}"
    if node.strategy == "pipeline":
        return f"pipeline {node.stages} stages x{node.micro_batches}"
    if node.strategy == "hybrid":
        return f"hybrid {node.replicas} x {node.stages} stages x{node.micro_batches}"
    return node.strategy


def part_behind(entry: Candidate, other: Candidate) -> float:
    """By which part of the other's speed an entry is slower; negative where it is faster."""
    return 1 - (entry.images_per_second or 0.0) / (other.images_per_second or 1.0)


def _noise(entry: Candidate, other: Candidate) -> float:
    """The standard error of what their speeds differ by, where both are known."""
    if entry.error is None or other.error is None:
        return 0.0
    return math.hypot(entry.error, other.error)


def _thread_counts(cores: int) -> list[int]:
    counts = {cores}
    half = cores // 2
    while half > 1:
        counts.add(half)
        half //= 2
    return sorted(counts - {1}, reverse=True)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
