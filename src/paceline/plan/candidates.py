"""Which ways of using a machine are worth a trial. Pure: cores and sizes in, candidates out."""

from __future__ import annotations

from typing import Literal

from paceline.schema import Candidate, NodePlan, Numerics
from paceline.schema.strategies import describe

MICRO_BATCHES = (4, 1, 2, 8)
"""The likeliest first: where it is far behind, the others need no trial."""
MAX_STAGES = 4
Precision = Literal["fp32", "bf16"]
MemoryFormat = Literal["contiguous", "channels_last"]


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


def _thread_counts(cores: int) -> list[int]:
    counts = {cores}
    half = cores // 2
    while half > 1:
        counts.add(half)
        half //= 2
    return sorted(counts - {1}, reverse=True)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
