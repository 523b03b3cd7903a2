"""Puts the per-layer partition into the plan of several nodes: model, bytes, choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.plan.partition import choose_partition, obstacle, with_partition
from paceline.schema import Config, Plan

if TYPE_CHECKING:
    from paceline.training.parts import Parts


def partitioned(config: Config, plan: Plan, parts: Parts | None = None) -> Plan:
    """The plan with the layers that `exchange.partition` means; as it was with one node.

    Builds the model here once, and runs it on a few samples, to see which layers can be split;
    where none can be split whatever it is, it is not built.
    """
    settings = config.exchange
    if len(plan.nodes) == 1 or settings.partition == "none":
        return plan
    from paceline.cost.split import Division
    from paceline.data.sampler import apportion
    from paceline.exchange.tensor_parallel.chains import find_chains
    from paceline.exchange.tensor_parallel.splittable import look_at
    from paceline.training.parts import make_parts

    shares = tuple(node.share for node in plan.nodes)
    division = Division(
        parts=tuple(apportion(plan.batch_size, shares)),
        shares=shares,
        value_bytes=2 if plan.precision == "bf16" else 4,
    )
    possible = obstacle(plan, settings, elementwise=":" not in config.optimizer.name)
    if possible and settings.partition == "auto":
        return plan
    opened = parts or make_parts(config)
    try:
        model = opened.build_model()
        seen = look_at(model, opened.trial(plan, model))
        chains = find_chains(model, seen=seen)
    finally:
        if parts is None:
            opened.dataset.close()
    choice = choose_partition(
        settings,
        chains,
        division,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        possible=possible,
        obstacles=seen.obstacles,
    )
    return with_partition(plan, choice)
