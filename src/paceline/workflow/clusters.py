"""Hosts that a Ray or Spark cluster names: found, checked, and found again after a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.errors import ConfigError, LostError, UserError, shown
from paceline.launch.clusters.engine import ClusterEngine, SparkEngine, Survey
from paceline.launch.engines import Engine, engine_class
from paceline.launch.inspection import Inspection, wanted_facts
from paceline.schema.hosts import Host, Hosts
from paceline.workflow.restarts import going_on_with
from paceline.workflow.training import HostsRequest

if TYPE_CHECKING:
    from paceline.launch.session import Session
    from paceline.workflow.training import TrainingStart


MakesSession = Callable[
    ["TrainingStart", Inspection | None, tuple[Host, ...], Engine | None], "Session"
]


def on_cluster(start: TrainingStart, make: MakesSession) -> Session:
    """The session on the cluster's hosts; its driver is ended where there is none."""
    request = start.hosts
    assert request is not None
    from paceline.workflow.spread import choose_engine

    engine = choose_engine(request, None)
    assert isinstance(engine, ClusterEngine)
    known = {host.network_address: host.name for host in request.hosts.host}
    survey = Survey(
        run=start.run.path,
        wanted=wanted_facts(start.config),
        nodes=request.nodes,
        only=known if start.broken is not None else None,
    )
    hosts, found = engine.survey(survey)
    try:
        if start.broken is not None and not hosts.host:
            raise LostError(f"{start.broken.why}; none of its hosts answers")
        if problems := found.problems():
            raise (LostError if start.broken else UserError)("\n".join(problems))
        start = dataclasses.replace(start, hosts=dataclasses.replace(request, hosts=hosts))
        absent: tuple[Host, ...] = ()
        if start.broken is not None:
            left = {host.name for host in hosts.host}
            absent = tuple(host for host in request.hosts.host if host.name not in left)
            absent += start.unheard
            start = going_on_with(start, start.broken, hosts.host)
        return make(start, found, absent, engine)
    except BaseException:
        engine.close()
        raise


def cluster_request(
    engine: str, *, hosts: str | None, nodes: int | None, address: str | None
) -> HostsRequest:
    """What is said of a cluster, which names its hosts itself."""
    cls = engine_class(engine)
    assert issubclass(cls, ClusterEngine)
    if hosts is not None:
        raise ConfigError(
            f"the cluster of engine {engine!r} names its hosts itself: leave hosts {shown(hosts)}"
            " out, and say how many with --nodes"
        )
    if address is None and cls is SparkEngine:
        raise ConfigError(
            f"engine {engine!r} must know its cluster: {cls.option} spark://host:7077"
        )
    return HostsRequest(
        hosts=Hosts(), engine=engine, options=(address,) if address else (), nodes=nodes
    )
