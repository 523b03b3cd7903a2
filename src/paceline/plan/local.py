"""The plan for one node, from what the user asked and what the race found."""

from __future__ import annotations

from typing import Literal

from paceline.errors import ConfigError
from paceline.schema import Config, LocalSettings, NodePlan, Plan

# Settings of [local] that each strategy understands; any other one is refused, not ignored.
OPTIONS: dict[str, tuple[str, ...]] = {
    "auto": (),
    "sequential": (),
    "threads": ("threads",),
    "replicas": ("replicas", "threads"),
    "processes": ("processes", "threads", "sync"),
    "pipeline": ("stages", "threads", "micro_batches", "split_at"),
    "hybrid": ("replicas", "stages", "threads", "micro_batches", "split_at"),
    "hogwild": ("processes", "threads"),
}


CROWD = 16
"""Workers, or threads of all of them together, per core: even small tests of large nodes need no
more, and thousands take the memory and the hours of a machine before they fail."""


def asked_node(settings: LocalSettings, cores: int, *, elementwise: bool = True) -> NodePlan:
    """The node plan that an explicit strategy with its options means on `cores` cores."""
    _refuse_foreign_options(settings)
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
    name = settings.strategy
    if name == "threads":
        return NodePlan(strategy=name, threads=settings.threads or cores)
    if name == "replicas":
        replicas = settings.replicas or cores
        return NodePlan(
            strategy=name, replicas=replicas, threads=settings.threads or max(1, cores // replicas)
        )
    if name in ("processes", "hogwild"):
        processes = settings.processes or cores
        sync: Literal["shared", "ddp"] = (
            ("shared" if elementwise else "ddp") if settings.sync == "auto" else settings.sync
        )
        return NodePlan(
            strategy=name,
            processes=processes,
            threads=settings.threads or max(1, cores // processes),
            sync=sync,
        )
    if name in ("pipeline", "hybrid"):
        return _staged_node(settings, cores)
    return NodePlan(strategy=name)


def _staged_node(settings: LocalSettings, cores: int) -> NodePlan:
    stages = settings.stages or (len(settings.split_at) + 1 if settings.split_at else 2)
    if settings.split_at and stages != len(settings.split_at) + 1:
        raise ConfigError(
            f"local.split_at names {len(settings.split_at)} cuts, which makes"
            f" {len(settings.split_at) + 1} stages, but local.stages = {stages}: leave one out"
        )
    replicas = 1
    if settings.strategy == "hybrid":
        replicas = settings.replicas or max(2, cores // stages)
    return NodePlan(
        strategy=settings.strategy,
        replicas=replicas,
        stages=stages,
        threads=settings.threads or max(1, cores // (replicas * stages)),
        micro_batches=settings.micro_batches or 4,
        schedule=settings.schedule,
        split_at=settings.split_at,
    )


def refuse_options_without_strategy(settings: LocalSettings) -> None:
    """With "auto" the race sets the options; one that was asked for would be ignored."""
    _refuse_foreign_options(settings)


def _refuse_foreign_options(settings: LocalSettings) -> None:
    known = OPTIONS[settings.strategy]
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
