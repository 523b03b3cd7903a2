"""What each local strategy is: one table, without torch. Nobody else compares their names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.schema.registry import Registry

if TYPE_CHECKING:
    from paceline.schema.plan import NodePlan


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How one node may use its own cores, as far as plans and costs need to know it."""

    place: str
    """"module:class" of the `paceline.local.base.LocalStrategy`, imported when it is used."""
    title: str
    """What a plan of it is called, with the fields of its `NodePlan` in braces."""
    options: tuple[str, ...] = ()
    """Settings of [local] that it understands; any other one is refused."""
    ranks: tuple[str, ...] = ()
    """Fields of `NodePlan` whose product is its number of processes; none: one process."""
    copies: str = ""
    """Field of `NodePlan` that counts the gradients kept beside each other; empty: one."""
    is_plain: bool = False
    """One process, the whole model, the whole batch: what a loop of plain PyTorch does."""
    cause: str = ""
    """Why it may be slower, with the fields of its plan, `gradient_mb` and `bubble` in braces."""

    @property
    def shares_memory(self) -> bool:
        """Whether weights lie in memory that ranks share, be it only one rank."""
        return bool(self.ranks)

    @property
    def has_stages(self) -> bool:
        """Whether the model is cut into parts."""
        return "stages" in self.ranks


_STAGES = ("replicas", "stages")
_IDLE = "stages stand idle {bubble:.0%} of the time, and activations are copied"

STRATEGIES: Registry[Strategy] = Registry(
    "local strategy",
    "paceline.strategies",
    {
        "sequential": Strategy(
            place="paceline.local.single:Sequential",
            title="sequential",
            is_plain=True,
            cause="one core of several",
        ),
        "threads": Strategy(
            place="paceline.local.single:Threads",
            title="threads {threads}",
            options=("threads",),
            is_plain=True,
            cause="threads wait for each other in every layer, processes once per update",
        ),
        "replicas": Strategy(
            place="paceline.local.replicas:Replicas",
            title="replicas {replicas}x{threads}",
            options=("replicas", "threads"),
            copies="replicas",
            cause="{replicas} threads share one interpreter and sum {gradient_mb:.1f} MB each",
        ),
        "processes": Strategy(
            place="paceline.local.processes:Processes",
            title="processes {processes}x{threads}",
            options=("processes", "threads", "sync"),
            ranks=("processes",),
            copies="processes",
            cause="every update sums {processes} x {gradient_mb:.1f} MB of gradients",
        ),
        "pipeline": Strategy(
            place="paceline.local.pipeline:Pipeline",
            title="pipeline {stages} stages x{micro_batches}",
            options=("stages", "threads", "micro_batches", "split_at"),
            ranks=_STAGES,
            copies="replicas",
            cause=_IDLE,
        ),
        "hybrid": Strategy(
            place="paceline.local.pipeline:Hybrid",
            title="hybrid {replicas} x {stages} stages x{micro_batches}",
            options=("replicas", "stages", "threads", "micro_batches", "split_at"),
            ranks=_STAGES,
            copies="replicas",
            cause=_IDLE,
        ),
        "hogwild": Strategy(
            place="paceline.local.hogwild:Hogwild",
            title="hogwild {processes}x{threads}",
            options=("processes", "threads"),
            ranks=("processes",),
            copies="processes",
        ),
    },
    Strategy,
)


def strategy_of(node: NodePlan) -> Strategy:
    """A plan's strategy; of one that is not installed here nothing is known but its name."""
    if node.strategy in STRATEGIES:
        return STRATEGIES[node.strategy]
    return Strategy(place="", title=node.strategy.replace("{", "{{").replace("}", "}}"))


def ranks_of(node: NodePlan) -> int:
    """How many processes a node runs.

    >>> from paceline.schema import NodePlan
    >>> ranks_of(NodePlan(strategy="hybrid", replicas=2, stages=3))
    6
    """
    return math.prod(getattr(node, name) for name in strategy_of(node).ranks)


def describe(node: NodePlan) -> str:
    """A node plan in a few words.

    >>> from paceline.schema import NodePlan
    >>> describe(NodePlan(strategy="processes", processes=2, sync="ddp"))
    'processes 2x1 (ddp)'
    """
    title = strategy_of(node).title.format_map(vars(node))
    return f"{title} (ddp)" if node.sync == "ddp" else title


def cause(node: NodePlan, gradient_mb: float) -> str:
    """Why a plan costs what it costs, as far as its arithmetic tells."""
    bubble = (node.stages - 1) / (node.micro_batches + node.stages - 1)
    return strategy_of(node).cause.format_map(
        vars(node) | {"gradient_mb": gradient_mb, "bubble": bubble}
    )
