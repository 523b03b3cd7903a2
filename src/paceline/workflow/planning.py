"""The plan that follows from measured machines, kept as they are."""

from __future__ import annotations

from paceline.config.cache import keep, kept, key_of, place_of
from paceline.plan.measured import choose
from paceline.schema import Config, Plan, encode
from paceline.schema.machines import Machines
from paceline.schema.plan import ExplainedPlan
from paceline.workflow.calibration import calibration

_VERSION = 2


def plan_machines(config: Config, machines: Machines) -> tuple[Plan, list[str]]:
    """The plan for measured machines, with lines for people; kept, since it follows from them."""
    factors = calibration()
    place = place_of("plans", key_of([_VERSION, encode(config), encode(machines), factors]))
    if (known := kept(ExplainedPlan, place)) is not None:
        return known.plan, list(known.lines)
    plan, lines = choose(config, machines, factors)
    keep(place, ExplainedPlan(plan=plan, lines=tuple(lines)))
    return plan, lines
