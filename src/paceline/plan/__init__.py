"""The planning stage: pure functions from what was measured to who does what."""

from paceline.plan.choose import plan_from_race
from paceline.plan.local import asked_node, asked_plan, refuse_options_without_strategy

__all__ = ["asked_node", "asked_plan", "plan_from_race", "refuse_options_without_strategy"]
