"""The planning stage: pure functions from what was measured to who does what."""

from paceline.plan.local import asked_node, asked_plan

__all__ = ["asked_node", "asked_plan"]
