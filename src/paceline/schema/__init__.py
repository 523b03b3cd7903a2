"""Frozen data that stages hand to each other, and its way to and from JSON and TOML."""

from paceline.schema.codec import decode, encode, read_json, write_json
from paceline.schema.config import (
    Config,
    Data,
    ExchangeSettings,
    LocalSettings,
    Numerics,
    Optimizer,
    Train,
    Until,
    WorkloadSettings,
)
from paceline.schema.plan import NodePlan, Plan, Rejected
from paceline.schema.race import Candidate, Race
from paceline.schema.rank import RankContext

__all__ = [
    "Candidate",
    "Config",
    "Data",
    "ExchangeSettings",
    "LocalSettings",
    "NodePlan",
    "Numerics",
    "Optimizer",
    "Plan",
    "Race",
    "RankContext",
    "Rejected",
    "Train",
    "Until",
    "WorkloadSettings",
    "decode",
    "encode",
    "read_json",
    "write_json",
]
