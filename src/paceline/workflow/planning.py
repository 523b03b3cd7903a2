"""The plan that follows from measured machines, kept as they are."""

from __future__ import annotations

import dataclasses

from paceline.config.cache import keep, kept, key_of, place_of
from paceline.plan.foresee import allowed_by, buckets_of, kinds_of, plan_from_choice
from paceline.plan.nodes import NodeChoice, choose_nodes, explain_nodes
from paceline.schema import Config, Plan, encode
from paceline.schema.machines import Machines
from paceline.schema.plan import ExplainedPlan
from paceline.workflow.calibration import calibration
from paceline.workflow.partitioning import partitioned


def plan_machines(config: Config, machines: Machines) -> tuple[Plan, list[str]]:
    """The plan for measured machines, with five lines for people; kept, since it follows from them.

    The layers that are split are those that the model really allows, which only
    building it tells.
    """
    factors = calibration()
    place = place_of("plans", key_of([encode(config), encode(machines), factors]))
    if (known := kept(ExplainedPlan, place)) is not None:
        return known.plan, list(known.lines)
    plan, choice = _choose(config, machines, factors)
    lines = explain_nodes(choice).splitlines()
    keep(place, ExplainedPlan(plan=plan, lines=tuple(lines)))
    return plan, lines


def _choose(
    config: Config, machines: Machines, factors: dict[str, float]
) -> tuple[Plan, NodeChoice]:
    for split in (True, False):
        choice = choose_nodes(
            machines,
            allow=allowed_by(config.exchange),
            kinds=kinds_of(config.exchange, split=split),
            buckets=buckets_of(config.exchange),
            every=config.exchange.every if config.exchange.kind == "averaging" else None,
            servers=(
                config.exchange.servers if config.exchange.kind == "parameter_server" else None
            ),
            calibration=factors,
        )
        plan = plan_from_choice(config, machines, choice, factors)
        if plan.partition == "none":
            break
        whole = dataclasses.replace(plan, partition="none", feature_layers=())
        real = partitioned(config, whole)
        if real.partition == "feature":
            return real, choice
    return plan, choice
