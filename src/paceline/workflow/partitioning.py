"""Which layers of a model can be split over nodes, and the plan with those that are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.plan.partition import choose_partition, obstacle, with_partition
from paceline.schema import Config, Plan

if TYPE_CHECKING:
    from paceline.cost.split import Chain
    from paceline.training.parts import Parts


def splittable(config: Config, plan: Plan, parts: Parts) -> tuple[Chain, ...]:
    """Linear layers that the nodes of a plan may split; none where the plan forbids it.

    Layers that `exchange.partition = "manual"` names and that cannot be split are refused.
    """
    return _looked_at(config, plan, parts)[0] if _may_split(config, plan) else ()


def partitioned(config: Config, plan: Plan, parts: Parts | None = None) -> Plan:
    """The plan with the layers that `exchange.partition` means; as it was with one node.

    Builds the model here once, and runs it on a few samples, to see which layers can be split;
    where none can be split whatever it is, it is not built.
    """
    if not _may_split(config, plan):
        return plan
    from paceline.training.parts import make_parts

    opened = parts or make_parts(config)
    try:
        _, found = _looked_at(config, plan, opened)
    finally:
        if parts is None:
            opened.dataset.close()
    return found


def _may_split(config: Config, plan: Plan) -> bool:
    if config.exchange.partition == "none" or len(plan.nodes) == 1:
        return False
    return config.exchange.partition == "manual" or not _obstacle(config, plan)


def _obstacle(config: Config, plan: Plan) -> str:
    return obstacle(plan, config.exchange, elementwise=":" not in config.optimizer.name)


def _looked_at(config: Config, plan: Plan, parts: Parts) -> tuple[tuple[Chain, ...], Plan]:
    """The model's chains, and the plan with those layers split for which that saves bytes."""
    from paceline.cost.split import Division
    from paceline.data.sampler import apportion
    from paceline.exchange.tensor_parallel.chains import find_chains
    from paceline.exchange.tensor_parallel.splittable import look_at

    shares = tuple(node.share for node in plan.nodes)
    division = Division(
        parts=tuple(apportion(plan.batch_size, shares)),
        shares=shares,
        value_bytes=2 if plan.precision == "bf16" else 4,
    )
    model = parts.build_model()
    seen = look_at(model, parts.trial(plan, model))
    chains = find_chains(model, seen=seen)
    choice = choose_partition(
        config.exchange,
        chains,
        division,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        possible=_obstacle(config, plan),
        obstacles=seen.obstacles,
    )
    return tuple(chains), with_partition(plan, choice)
