"""The planning stage: pure functions from what was measured to who does what."""

from paceline.plan.choose import plan_from_race
from paceline.plan.local import asked_node, asked_plan, refuse_foreign_options

__all__ = ["asked_node", "asked_plan", "plan_from_race", "refuse_foreign_options"]
