"""What may be tried on one machine, and what is hoped of it before anything was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from paceline.plan.candidates import (
    MemoryFormat,
    Precision,
    candidate,
    structures,
    variants,
)
from paceline.plan.pilot import Option
from paceline.schema import Candidate, Config, NodePlan, Plan
from paceline.schema.strategies import describe

HOPES: Mapping[str, float] = {
    "replicas": 0.95,
    "processes": 0.85,
    "channels_last": 0.9,
    "bf16": 0.6,
}
"""What a trait multiplies the seconds of an update by where it helps, as the benchmarks found.

Only an order of trials follows from these: each is tried before it is used. Stages of a pipeline
are not here: on the cores of one machine they were never faster, so `train` does not try them.
"""


def options(
    config: Config,
    *,
    cores: int,
    batch_size: int,
    elementwise: bool,
    images: bool,
    many: bool,
    divisible: bool,
    rounds: bool,
    learned: Mapping[str, float],
) -> list[tuple[Option, Candidate]]:
    """Every plan that `train` may choose by itself, the simplest first.

    `many`: whether other processes can be used; `divisible`: whether a batch may be divided, which
    a layer that looks across samples forbids; `rounds`: whether the processor computes in bf16
    itself, for where it only imitates that, bf16 is slower and not tried. `learned`: factors from
    past trainings here.
    """
    plain = NodePlan(strategy="threads", threads=cores) if cores > 1 else NodePlan()
    nodes = [plain] + [
        node
        for node in structures(cores, batch_size, elementwise=elementwise, many=many)
        if divisible and node.strategy in HOPES
    ]
    allowed = {config.numerics.precision, *(config.numerics.allow if rounds else ())}
    found = []
    for node in nodes:
        for precision, memory_format in variants(config.numerics, images=images):
            if precision == "bf16" and precision not in allowed:
                continue
            entry = candidate(node, precision, memory_format)
            traits = _traits(node, plain, precision, memory_format)
            factors = {trait: learned.get(trait, hope) for trait, hope in traits.items()}
            ranks = node.ranks if node.shares_memory else 0
            found.append((Option(name=entry.name, factors=factors, ranks=ranks), entry))
    return sorted(found, key=lambda pair: len(pair[0].factors))


def _traits(
    node: NodePlan, plain: NodePlan, precision: Precision, memory_format: MemoryFormat
) -> dict[str, float]:
    """What sets a plan apart from the plain one, each with what is hoped of it."""
    traits: dict[str, float] = {}
    if node != plain:
        traits[describe(node)] = HOPES[node.strategy]
    if memory_format != "contiguous":
        traits[memory_format] = HOPES[memory_format]
    if precision != "fp32":
        traits[precision] = HOPES[precision]
    return traits


def plan_of(config: Config, entry: Candidate, batch_size: int, reason: str) -> Plan:
    """The plan that a candidate means on one machine."""
    return Plan(
        nodes=(entry.node,),
        precision=cast(Precision, entry.precision),
        memory_format=cast(MemoryFormat, entry.memory_format),
        compile=config.numerics.compile,
        batch_size=batch_size,
        reason=reason,
    )


def name_of(plan: Plan) -> str:
    """The name of the candidate that a plan of one node is."""
    return candidate(plan.nodes[0], plan.precision, plan.memory_format).name
