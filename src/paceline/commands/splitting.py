"""Which layers of a plan's model are split over its nodes. A part of `api`, kept apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.plan.partition import choose_partition, obstacle, with_partition
from paceline.schema import Config, Plan

if TYPE_CHECKING:
    from paceline.train.parts import Parts


def with_split_layers(config: Config, plan: Plan, parts: Parts | None = None) -> Plan:
    """The plan with the layers that are worth splitting, from the bytes that travel.

    Builds the model once, to see its layers.
    """
    if len(plan.nodes) == 1 or config.exchange.partition == "none":
        return plan
    from paceline.cost.split import Division
    from paceline.data.sampler import apportion
    from paceline.exchange.chains import find_chains
    from paceline.train.parts import make_parts

    opened = parts or make_parts(config)
    try:
        model = opened.build_model()
        shape = opened.dataset.sample_shape
    finally:
        if parts is None:
            opened.dataset.close()
    shares = tuple(node.share for node in plan.nodes)
    choice = choose_partition(
        config.exchange,
        find_chains(model, shape),
        Division(parts=tuple(apportion(plan.batch_size, shares)), shares=shares),
        parameters=sum(p.numel() for p in model.parameters()),
        possible=obstacle(plan, config.exchange, elementwise=opened.elementwise),
    )
    return with_partition(plan, choice)
