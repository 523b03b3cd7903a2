"""The plan for one node, from what the user asked and what the race found."""

from __future__ import annotations

from typing import Literal

from paceline.errors import ConfigError
from paceline.schema import Config, LocalSettings, NodePlan, Plan
from paceline.schema.strategies import STRATEGIES

CROWD = 16
"""Workers, or threads of all of them together, per core: even small tests of large nodes need no
more, and thousands take the memory and the hours of a machine before they fail."""


def asked_node(settings: LocalSettings, cores: int, *, elementwise: bool = True) -> NodePlan:
    """The node plan that an explicit strategy with its options means on `cores` cores."""
    refuse_foreign_options(settings)
    _refuse_crowds(settings, cores)
    return _asked(settings, cores, elementwise=elementwise)


def _refuse_crowds(settings: LocalSettings, cores: int) -> None:
    """Refuse more workers or threads than any use of this machine has."""
    most, found = CROWD * cores, 1
    for option in ("processes", "replicas", "stages", "threads"):
        count = getattr(settings, option) or 1
        found *= count
        if found > most:
            times = f" ({found} with the other options of [local])" if found > count else ""
            raise ConfigError(
                f"local.{option} = {count}{times} is more than {CROWD} for each of the {cores}"
                f" cores that can be used: set it to at most {max(1, most * count // found)}"
            )


def _asked(settings: LocalSettings, cores: int, *, elementwise: bool) -> NodePlan:
    """Options that were left out are chosen so that all cores are used."""
    options = STRATEGIES[settings.strategy].options
    stages = _stages(settings) if "stages" in options else 1
    processes = settings.processes or cores if "processes" in options else 1
    replicas = 1
    if "replicas" in options:
        replicas = settings.replicas or (max(2, cores // stages) if stages > 1 else cores)
    threads = settings.threads or max(1, cores // (stages * processes * replicas))
    sync: Literal["shared", "ddp"] = "shared"
    if "sync" in options:
        sync = settings.sync if settings.sync != "auto" else "shared" if elementwise else "ddp"
    return NodePlan(
        strategy=settings.strategy,
        processes=processes,
        threads=threads if "threads" in options else 1,
        replicas=replicas,
        stages=stages,
        micro_batches=settings.micro_batches or 4 if "micro_batches" in options else 1,
        schedule=settings.schedule if "stages" in options else "gpipe",
        split_at=settings.split_at,
        sync=sync,
    )


def _stages(settings: LocalSettings) -> int:
    stages = settings.stages or (len(settings.split_at) + 1 if settings.split_at else 2)
    if settings.split_at and stages != len(settings.split_at) + 1:
        raise ConfigError(
            f"local.split_at names {len(settings.split_at)} cuts, which makes"
            f" {len(settings.split_at) + 1} stages, but local.stages = {stages}: leave one out"
        )
    return stages


def refuse_foreign_options(settings: LocalSettings) -> None:
    """Options that the strategy would ignore; with "auto" that is any, since it sets them."""
    known = STRATEGIES[settings.strategy].options if settings.strategy != "auto" else ()
    for option in ("processes", "threads", "replicas", "stages", "micro_batches", "split_at"):
        if getattr(settings, option) and option not in known:
            valid = ", ".join(known) or "none"
            raise ConfigError(
                f"local.{option} = {getattr(settings, option)!r} means nothing to"
                f" local.strategy = {settings.strategy!r}, whose options are: {valid}"
            )


def asked_plan(config: Config, node: NodePlan, reason: str) -> Plan:
    """A plan for this machine alone, with the numerics that were asked for."""
    numerics = config.numerics
    return Plan(
        nodes=(node,),
        precision="fp32" if numerics.precision == "auto" else numerics.precision,
        memory_format=(
            "contiguous" if numerics.memory_format == "auto" else numerics.memory_format
        ),
        compile=numerics.compile,
        batch_size=config.workload.global_batch(node.workers),
        reason=reason,
    )
