"""What may be chosen when machines are joined, and what past runs say of it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.cost.exchanges import ExchangeCost
from paceline.cost.overlap import BUCKET
from paceline.plan.options import Option

BUCKETS = (BUCKET, 2**20, 25 * 2**20, 100 * 2**20)
"""Bucket sizes that are considered for allreduce, the usual one first."""
Factors = Mapping[str, float]
"""Per exchange, what past runs took against what was predicted."""


@dataclass(frozen=True)
class Rules:
    """What may be chosen."""

    allow: Sequence[str] = ()
    kinds: Sequence[str] | None = None
    buckets: Sequence[float] = BUCKETS
    every: int | None = None
    servers: int | None = None

    def as_asked(self, exchange: ExchangeCost, nodes: int) -> ExchangeCost:
        """With the steps between averages and the number of servers that were asked for."""
        if exchange.kind == "averaging" and self.every is not None:
            return dataclasses.replace(exchange, every=self.every)
        if exchange.kind == "parameter_server" and self.servers is not None:
            return dataclasses.replace(exchange, servers=max(1, min(self.servers, nodes - 1)))
        return exchange

    def runs(self, option: Option) -> bool:
        """Whether it is one of the exchanges that can be run, or that were asked for."""
        wanted = "partition" if option.exchange.partition else option.exchange.kind
        return self.kinds is None or len(option.hosts) == 1 or wanted in self.kinds

    def allows(self, option: Option) -> bool:
        """Whether its weights are those of one machine, or others were allowed."""
        if option.exact or len(option.hosts) == 1:
            return True
        return ("async" if option.exchange.asynchronous else option.exchange.kind) in self.allow
