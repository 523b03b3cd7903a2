"""The support matrix: which ways to train go together over several nodes, as data.

A combination works unless a rule below names it. Every rule says why and what to do instead; the
first that fits is what the user reads. `tests/parity/test_support.py` trains every cell that the
rules leave, and has every rule refuse; `docs/support.md` is printed from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from paceline.errors import UnsupportedError
from paceline.schema import exchanges
from paceline.schema.config import ExchangeSettings
from paceline.schema.plan import NodePlan, Plan

DDP = "processes, ddp"
STRATEGIES = (
    "sequential", "threads", "replicas", "processes", DDP, "pipeline", "hybrid", "hogwild",
)  # fmt: skip
SEVERAL_RANKS = ("processes", DDP, "pipeline", "hybrid", "hogwild")
SUMS = ("allreduce", "ring", "reduce_broadcast")
"""Exchanges that sum gradients at every update."""
EXCHANGES = tuple(exchanges.EXCHANGES.own)
COMPRESSIONS = ("none", "bf16", "powersgd")
PARTITIONS = ("none", "feature")
SHARES = ("equal", "unequal", "zero")
"""Zero: a node that takes no samples at all."""
BACKENDS = ("gloo", "mpi4py")


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One cell: what a node does, and how the nodes agree."""

    strategy: str = "threads"
    exchange: str = "allreduce"
    compression: str = "none"
    partition: str = "none"
    shares: str = "equal"
    backend: str = "gloo"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Combinations that do not work: those whose every part is named here, empty meaning any."""

    strategy: tuple[str, ...] = ()
    exchange: tuple[str, ...] = ()
    compression: tuple[str, ...] = ()
    partition: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    backend: tuple[str, ...] = ()
    why: str
    """Begins after "local.strategy = 'x'" or whatever the rule is about."""

    def names(self, cell: Combination) -> bool:
        """Whether the combination is one of these."""
        parts = (field.name for field in fields(cell))
        return all(not (s := getattr(self, name)) or getattr(cell, name) in s for name in parts)


def _but(values: tuple[str, ...], *out: str) -> tuple[str, ...]:
    return tuple(value for value in values if value not in out)


RULES = (
    Rule(
        strategy=(DDP,),
        why="local.sync = 'ddp' sums inside one node only: use local.sync = 'shared' with several"
        " hosts, or give a host as many slots as it should have processes",
    ),
    Rule(
        strategy=("hogwild",),
        why="local.strategy = 'hogwild' has no gradient to exchange with other hosts: use another,"
        " or exchange.kind = 'hogwild' with local.strategy = 'threads'",
    ),
    Rule(
        compression=("bf16", "powersgd"),
        exchange=_but(EXCHANGES, "allreduce"),
        why="exchange.compression works with exchange.kind = 'allreduce' alone: use that, or"
        " compression = 'none'",
    ),
    Rule(
        strategy=SEVERAL_RANKS,
        compression=("powersgd",),
        why="exchange.compression = 'powersgd' needs one rank per node, which sees whole matrices:"
        " use local.strategy = 'threads' or 'replicas', or compression = 'bf16'",
    ),
    Rule(
        strategy=SEVERAL_RANKS,
        exchange=("parameter_server",),
        why="exchange.kind = 'parameter_server' needs one rank per node: use local.strategy ="
        " 'threads' or 'replicas', or give the host slots",
    ),
    Rule(
        strategy=SEVERAL_RANKS,
        exchange=("hogwild",),
        why="exchange.kind = 'hogwild' needs one rank per node: use local.strategy = 'threads' or"
        " 'replicas', or give the host slots",
    ),
    Rule(
        exchange=("hogwild",),
        shares=("zero",),
        why="exchange.kind = 'hogwild' mixes trained copies, and a host with a share of 0 has none:"
        " give it samples, or leave it out",
    ),
    Rule(
        partition=("feature",),
        strategy=_but(STRATEGIES, "sequential", "threads"),
        why="layers are split over nodes only where a node is one rank with one copy of the model:"
        " use local.strategy = 'threads' or 'sequential', or exchange.partition = 'none'",
    ),
    Rule(
        partition=("feature",),
        exchange=_but(EXCHANGES, *SUMS),
        why="split layers need an exchange that sums gradients at every update: use one of"
        f" {', '.join(SUMS)}, or exchange.partition = 'none'",
    ),
)


def refusal(cell: Combination) -> str:
    """Why a combination does not work, and what does; empty where it does."""
    return next((rule.why for rule in RULES if rule.names(cell)), "")


def strategy_name(node: NodePlan) -> str:
    """What the matrix calls a node's local strategy."""
    return DDP if node.strategy == "processes" and node.sync == "ddp" else node.strategy


def combinations(
    plan: Plan, settings: ExchangeSettings, backend: str
) -> Iterator[tuple[str, Combination]]:
    """What every node of a plan asks for, with the node's host."""
    workers = [node for node in plan.nodes if node.role == "worker"]
    parts = {node.share for node in workers}
    shares = "zero" if 0 in parts else "equal" if len(parts) == 1 else "unequal"
    for node in workers:
        yield (
            node.host,
            Combination(
                strategy=strategy_name(node),
                exchange=plan.exchange,
                compression=settings.compression,
                partition="feature" if plan.feature_layers else "none",
                shares=shares,
                backend=backend,
            ),
        )


def check_support(plan: Plan, settings: ExchangeSettings, backend: str) -> None:
    """Refuse a plan that has a combination outside the matrix; one node may be anything.

    It is the same on every node, so that none waits for one that has refused.
    """
    if len(plan.nodes) == 1:
        return
    for host, cell in combinations(plan, settings, backend):
        if why := refusal(cell):
            raise UnsupportedError(f"host {host}: {why}")
