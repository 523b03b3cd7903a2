"""The driver of a cluster: a process of its own, between the launcher and Ray or Spark.

It holds the cluster's client (threads, a JVM), so that the launcher needs neither and Ctrl-C is
ours. One order per line of its standard input, one answer per line of its standard output:

    {"survey": {...}}  ->  {"hosts": [{"name", "address", "cpus", "facts"}]} or {"error": "..."}
    {"agents": [...], "words": [...], "variables": {...}}   runs them to their end
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from paceline.errors import PacelineError
from paceline.secure.addresses import own_addresses, resolved

Table = dict[str, Any]
CHECKS = "paceline.launch.checks"


class Cluster(ABC):
    """What a driver asks of its cluster."""

    @abstractmethod
    def hosts(self, survey: Table) -> list[Table]:
        """Every host that has CPUs for us and answers: name, address, cpus, facts or failure."""

    @abstractmethod
    def run(self, agents: Sequence[Table], words: list[str], variables: dict[str, str]) -> None:
        """Run the agents, each on the host whose `address` it names, until the last has ended."""

    @abstractmethod
    def close(self) -> None:
        """Let the cluster go."""


def serve(cluster: Cluster) -> int:
    """Answer the launcher until it has no more orders."""
    # What a cluster's client prints must not mix with the answers.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        try:
            for line in sys.stdin:
                order = json.loads(line)
                if "survey" in order:
                    print(json.dumps(_surveyed(cluster, order["survey"])), file=answers, flush=True)
                else:
                    cluster.run(order["agents"], order["words"], order["variables"])
                    return 0
        finally:
            with contextlib.suppress(Exception):
                cluster.close()
    return 0


def _surveyed(cluster: Cluster, survey: Table) -> Table:
    try:
        found = cluster.hosts(survey)
    except PacelineError as error:
        return {"error": str(error)}
    except Exception as error:  # of a client that is not ours: Java's follows a colon
        say(str(error))
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        lines = [line for line in lines if line.startswith(": ")] or lines or ["no reason given"]
        return {"error": f"{type(error).__name__}: {lines[0].removeprefix(': ')[:600]}"}
    here = set(own_addresses())
    # The first node writes what all share: best where the launcher sees it.
    found.sort(key=lambda host: not resolved(host["address"]) & here)
    return {"hosts": _named_apart(found)}


def is_asked(survey: Table, address: str) -> bool:
    """Whether a host may take part."""
    return survey["only"] is None or address in survey["only"]


def _named_apart(hosts: list[Table]) -> list[Table]:
    """Every host under a name of its own: its own name, or its address where two have the same."""
    names = [host["name"] for host in hosts]
    return [
        host if names.count(host["name"]) == 1 else {**host, "name": host["address"]}
        for host in hosts
    ]


def say(text: str) -> None:
    """For the log in the run directory."""
    print(text, file=sys.stderr, flush=True)
