"""A training over hosts that a loss has ended as a whole, started again on the hosts that are left.

MPI dies as a whole, and so does every exchange whose first node is lost. What was done since the
newest checkpoint is done again; the weights are those of a run that was never broken.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from paceline.errors import LostError, PacelineError, UserError
from paceline.launch.collect import newest_here
from paceline.launch.inspection import Inspection, inspect_hosts, wanted_facts
from paceline.schema import Plan, read_json
from paceline.schema.hosts import Host
from paceline.schema.legs import Broken

if TYPE_CHECKING:
    from paceline.api import TrainingStart
    from paceline.launch.session import Session

ANSWER_SECONDS = 20.0
"""How long a host that may be there has to answer: ssh itself gives up after ten."""


class Restarts:
    """How often a training may still be started again."""

    def __init__(self, start: TrainingStart) -> None:
        self._asked = start
        self._newest = newest_here(start.run.path)
        self._tries = 0

    def after(self, session: Session, error: PacelineError, start: TrainingStart) -> TrainingStart:
        """How training goes on after a session that was lost; raises the error where it cannot."""
        began = session.training or start.broken is not None
        if not began or session.signals.numbers or session.engine.places_nodes or start.fixed:
            raise error
        newest, allowed = newest_here(start.run.path), start.config.train.restarts
        if newest > self._newest:
            self._newest, self._tries = newest, 0
        self._tries += 1
        if self._tries > allowed:
            if not allowed:
                raise error
            raise type(error)(
                f"{error}; started again {allowed} time{'s' if allowed > 1 else ''} without a new"
                " checkpoint: train.restarts allows no more"
            ) from None
        assert self._asked.hosts is not None
        every, engine = self._asked.hosts.hosts, self._asked.hosts.engine
        if not every.host:  # a cluster has named them
            every = session.order.hosts
        heard = tuple(host for host in every.host if host.name not in session.unheard)
        if not heard:
            raise error
        reached = max((session.reached(node) for node in range(len(session.places))), default=0)
        again = f" ({reached - newest} updates are done again)" if reached > newest else ""
        start.say(f"{error}; starting again from update {newest}{again}")
        if engine == "auto" and session.is_led and session.engine.backend != "gloo":
            engine = "ssh"
            start.say("over Gloo from now on: the next loss will not end all nodes")
        return dataclasses.replace(
            start,
            script=(),
            hosts=dataclasses.replace(
                self._asked.hosts, hosts=dataclasses.replace(every, host=heard), engine=engine
            ),
            unheard=tuple(host for host in every.host if host not in heard),
            began=time.perf_counter(),
            broken=Broken(
                why=str(error),
                left=tuple(host.name for host in session.order.hosts.host),
                at=time.time(),
            ),
        )


def on_those_left(
    start: TrainingStart, broken: Broken
) -> tuple[TrainingStart, Inspection, tuple[Host, ...]]:
    """A training that is started again, on those of its hosts that answer, and the other hosts."""
    assert start.hosts is not None
    hosts = start.hosts.hosts
    found = inspect_hosts(hosts.in_order, wanted_facts(start.config), seconds=ANSWER_SECONDS)
    kept = tuple(host for host in hosts.host if host.name in found.facts)
    absent = tuple(host for host in hosts.host if host not in kept) + start.unheard
    if not kept:
        reasons = "; ".join(f"host {name}: {why}" for name, why in found.failures.items())
        raise LostError(f"{broken.why}; none of its hosts answers ({reasons})")
    found = dataclasses.replace(found, failures={})
    if problems := found.problems():
        raise LostError(f"{broken.why}; those that are left cannot train: {'; '.join(problems)}")
    return going_on_with(start, broken, kept), found, absent


def going_on_with(start: TrainingStart, broken: Broken, kept: tuple[Host, ...]) -> TrainingStart:
    """A training that is started again, on these of its hosts."""
    assert start.hosts is not None
    run = start.run
    names = {host.name for host in kept}
    gone = tuple(name for name in broken.left if name not in names)
    start.say(f"training goes on with {', '.join(host.name for host in kept)}")
    plan = None
    if newest_here(run.path):
        plan = _plan_left(start, names)
    else:  # nothing is lost: there is nothing to go on from
        for file in (run.metrics, run.legs):
            file.unlink(missing_ok=True)
    hosts = dataclasses.replace(start.hosts.hosts, host=kept)
    return dataclasses.replace(
        start,
        plan=plan,
        hosts=dataclasses.replace(start.hosts, hosts=hosts),
        broken=dataclasses.replace(broken, left=gone),
    )


def _plan_left(start: TrainingStart, hosts: set[str]) -> Plan | None:
    """The plan that the run was left with, without the nodes of hosts that have gone."""
    try:
        plan = read_json(Plan, start.run.plan)
    except UserError:
        return None
    nodes = tuple(node for node in plan.nodes if node.host in hosts)
    if len(nodes) == len(plan.nodes):
        return plan
    if not nodes or plan.feature_layers or not start.run.legs.exists():
        return None
    exchange = plan.exchange if len(nodes) > 1 else "allreduce"
    return dataclasses.replace(plan, nodes=nodes, exchange=exchange)
