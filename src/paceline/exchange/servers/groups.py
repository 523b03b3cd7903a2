"""Who talks to whom with parameter servers: SINGA's worker groups and server groups. Pure.

Workers of one group make one update together; groups do not wait for each other. A server group
holds a whole copy of the weights in shards, and every worker group is bound to one of them:

    workers         0  1 | 2  3 | 4  5 | 6  7      groups = 4
    server groups   ------0----- ------1------     server_groups = 2
    servers             8  9        10  11         servers = 4
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.schema import ExchangeSettings, Plan


@dataclass(frozen=True, kw_only=True)
class ServerGroup:
    """One copy of the weights: who holds it, and who trains it."""

    number: int
    servers: tuple[int, ...]
    workers: tuple[tuple[int, str, int], ...]
    """Node, host and worker group of every planned worker that is bound to it."""


def worker_groups(workers: int, mode: str, groups: int | None) -> int:
    """How many groups of workers there are: one for all, one each, or what was asked for.

    >>> worker_groups(4, "sync", None), worker_groups(4, "async", None)
    (1, 4)
    >>> worker_groups(4, "async", 2)
    2
    """
    if mode == "sync":
        return 1
    return workers if groups is None else min(groups, workers)


def group_of(index: int, workers: int, mode: str, groups: int | None) -> int:
    """The group of the worker with this index; one beyond the plan is in the last group.

    >>> [group_of(i, 4, "async", 2) for i in range(4)]
    [0, 0, 1, 1]
    >>> [group_of(i, 3, "async", None) for i in range(3)], group_of(2, 3, "sync", None)
    ([0, 1, 2], 0)
    """
    count = worker_groups(workers, mode, groups)
    return (
        index if mode != "sync" and groups is None else min(index, workers - 1) * count // workers
    )


def check_groups(plan: Plan, options: ExchangeSettings) -> None:
    """Refuse numbers that do not fit the nodes at hand."""
    count, servers, workers = options.server_groups, len(plan.servers), min(plan.servers)
    if servers % count:
        raise ConfigError(
            f"exchange.server_groups = {count} does not divide {servers} servers: give every group"
            f" as many, with exchange.servers = {count * max(1, servers // count)} for example"
        )
    groups = worker_groups(workers, options.mode, options.groups)
    if groups < count:
        raise ConfigError(
            f"exchange.server_groups = {count} leaves a server group without workers, since there"
            f" are {groups} worker groups of {workers} workers: use {groups} or fewer"
        )


def server_groups(plan: Plan, options: ExchangeSettings) -> list[ServerGroup]:
    """All server groups of a plan, the first worker's first."""
    servers, planned = plan.servers, min(plan.servers)
    size = len(servers) // options.server_groups
    found = []
    for number in range(options.server_groups):
        bound = tuple(
            (node, plan.nodes[node].host, group_of(node, planned, options.mode, options.groups))
            for node in range(planned)
            if server_group(node, planned, options) == number
        )
        own = servers[number * size : (number + 1) * size]
        found.append(ServerGroup(number=number, servers=own, workers=bound))
    return found


def server_group(node: int, workers: int, options: ExchangeSettings) -> int:
    """The server group of a worker, of one that joins too."""
    groups = worker_groups(workers, options.mode, options.groups)
    group = group_of(node, workers, options.mode, options.groups)
    return min(group, groups - 1) * options.server_groups // groups
