"""The training stage: from a plan to weights."""
