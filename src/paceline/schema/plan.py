"""The plan: frozen data that says who does what, why, and what was rejected."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.errors import ConfigError
from paceline.schema.codec import rule
from paceline.schema.strategies import ranks_of, strategy_of

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    host: str = "localhost"
    role: Literal["worker", "server"] = "worker"
    """"server" holds weights for the exchange parameter_server and computes nothing."""
    strategy: str = "sequential"
    share: float = rule(default=1.0, minimum=0.0)
    """Part of every global batch that this node takes, in proportion to the others' shares."""
    processes: int = rule(default=1, minimum=1)
    threads: int = rule(default=1, minimum=1)
    replicas: int = rule(default=1, minimum=1)
    stages: int = rule(default=1, minimum=1)
    micro_batches: int = rule(default=1, minimum=1)
    schedule: Literal["gpipe", "1f1b"] = "gpipe"
    split_at: tuple[str, ...] = ()
    sync: Literal["shared", "ddp"] = "shared"
    cores: tuple[int, ...] = ()
    """Cores that the node's ranks are pinned to, in order; all visible ones when empty."""

    @property
    def ranks(self) -> int:
        """How many processes this node runs."""
        return ranks_of(self)

    @property
    def shares_memory(self) -> bool:
        """Whether its weights lie in memory that ranks share, be it only one rank."""
        return strategy_of(self).shares_memory

    @property
    def divides(self) -> bool:
        """Whether losses are computed of parts of the node's share, and not of all of it."""
        return self.workers > 1 or self.replicas > 1 or self.micro_batches > 1

    @property
    def workers(self) -> int:
        """How many disjoint parts of the node's share are worked on by ranks of their own."""
        return self.ranks // self.stages if strategy_of(self).has_stages else self.ranks


@dataclass(frozen=True, kw_only=True)
class Rejected:
    option: str
    images_per_second: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train: written to plan.json, editable by hand, run exactly as it stands."""

    format: int = FORMAT
    nodes: tuple[NodePlan, ...] = (NodePlan(),)
    exchange: str = "allreduce"
    partition: Literal["none", "feature"] = "none"
    """Whether linear layers are split by feature over nodes."""
    feature_layers: tuple[str, ...] = ()
    """With partition "feature": names of the layers that are."""
    bucket_mb: float | None = rule(default=None, minimum=0.001)
    """Megabytes of gradient that leave together; exchange.bucket_mb when left out."""
    precision: Literal["fp32", "bf16"] = "fp32"
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    compile: bool = False
    batch_size: int = rule(default=128, minimum=1)
    reason: str = ""
    predicted: dict[str, float] = field(default_factory=dict)
    rejected: tuple[Rejected, ...] = ()

    @property
    def servers(self) -> tuple[int, ...]:
        """Numbers of the nodes that serve."""
        return tuple(n for n, node in enumerate(self.nodes) if node.role == "server")

    def with_servers(self, count: int, joining: int = 0) -> Plan:
        """With roles settled for parameter_server: the last `count` nodes serve if none is named.

        `joining`: the number of a node that joins; one that the plan does not have is added, as
        another worker like the first.
        """
        if self.exchange != "parameter_server" or len(self.nodes) == 1:
            return self
        nodes = list(self.nodes)
        if not self.servers:
            if count >= len(nodes):
                raise ConfigError(
                    f"exchange.servers = {count} leaves no worker among {len(nodes)} nodes: use"
                    f" {len(nodes) - 1} or fewer"
                )
            nodes[-count:] = [replace(node, role="server") for node in nodes[-count:]]
        first = min(n for n, node in enumerate(nodes) if node.role == "server")
        if first == 0 or any(node.role == "worker" for node in nodes[first:]):
            raise ConfigError(
                f"{nodes[first].host} serves and stands before a worker in the plan: name all"
                " workers first (the first one writes what all share)"
            )
        nodes[first:] = [replace(node, share=0.0, strategy="sequential") for node in nodes[first:]]
        while joining >= len(nodes):
            nodes.append(replace(nodes[0], host=f"joined-{len(nodes)}", cores=()))
        return replace(self, nodes=tuple(nodes))


@dataclass(frozen=True, kw_only=True)
class ExplainedPlan:
    """A plan with what is said about it."""

    plan: Plan
    lines: tuple[str, ...] = ()
