"""Measuring machines: this one, or hosts through their agents; and the plan that follows.

A part of `api`, kept apart.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paceline.config import dump_config
from paceline.config.cache import keep, kept, key_of, place_of
from paceline.errors import ConfigError, UnsupportedError
from paceline.plan.measured import choose
from paceline.schema import Config, Plan, encode
from paceline.schema.machines import AllReduceCurve, Link, Machines, MeasuredHost
from paceline.schema.plan import ExplainedPlan
from paceline.workflow.calibration import calibration

if TYPE_CHECKING:
    from paceline.api import HostsRequest
    from paceline.launch.session import Session
    from paceline.schema.hosts import Hosts, NodePlace

_VERSION = 3


def place_name(place: NodePlace) -> str:
    """What machines.json calls a node: its host, with the slot where there are several."""
    return place.host.name + (f"-{place.slot}" if place.host.slots > 1 else "")


def cache_path(config: Config, hosts: Hosts) -> Path:
    """Where the measurements of these hosts for this workload are kept."""
    facts = [
        _VERSION,
        [encode(host) for host in hosts.in_order],
        encode(config.workload),
        [config.optimizer.name, config.optimizer.momentum, config.optimizer.clip_norm],
        encode(config.numerics),
        encode(config.data),
        config.train.device,
        [metadata.version("paceline"), metadata.version("torch")],
    ]
    return place_of("machines", key_of(facts))


def kept_machines(config: Config, hosts: Hosts) -> Machines | None:
    """What the cache holds of these hosts for this workload, or None."""
    found = kept(Machines, cache_path(config, hosts))
    return with_settings(found, config) if found is not None else None


def with_settings(found: Machines, config: Config, *, same_workload: bool = True) -> Machines:
    """What does not change a measurement is taken from the configuration at hand.

    `same_workload`: refuse a configuration of another model or data than was measured.
    """
    name = f"{config.workload.model} on {config.workload.data}"
    if same_workload and found.workload.name not in ("", name):
        raise ConfigError(
            f"the machines were measured for {found.workload.name}, but the configuration trains"
            f" {name}: measure them for it"
        )
    facts = dataclasses.replace(
        found.workload,
        batch_size=config.workload.global_batch(1),
        batch_per_worker=config.workload.batch_per_worker,
        epochs=config.train.epochs,
        steps=config.train.steps,
    )
    return dataclasses.replace(found, workload=facts)


def measure_hosts(
    config: Config, request: HostsRequest, *, again: bool, say: Callable[[str], None]
) -> tuple[Machines, bool]:
    """All hosts and what joins them; True when it came from the cache."""
    from paceline.launch.engines import finds_hosts

    if finds_hosts(request.engine):
        raise UnsupportedError(
            f"engine {request.engine!r} trains, but measures nothing by itself: measure the same"
            " hosts over ssh, with --hosts"
        )
    chosen_here = request.engine.partition(":")[0] != "slurm"
    known = kept_machines(config, request.hosts) if chosen_here and not again else None
    if known is not None:
        return known, True
    from paceline.launch.inspection import check_hosts
    from paceline.launch.session import HostOrder, Session
    from paceline.run import RunDirectory
    from paceline.workflow.spread import choose_engine, reach

    inspected = None
    if chosen_here:
        inspected = check_hosts(request.hosts.in_order, config)
        for warning in inspected.warnings():
            say(f"warning: {warning}")
    engine = choose_engine(request, inspected)
    found: list[Machines] = []
    hosts = [request.hosts]

    def work(session: Session) -> None:
        hosts[:] = [session.hosts]
        found.append(_survey(session, engine.backend, again=again, say=say))

    with tempfile.TemporaryDirectory(prefix="paceline-measure-") as folder:
        run = RunDirectory(Path(folder))
        text = dump_config(config)
        run.config.write_text(text)
        order = HostOrder(
            run=run,
            hosts=request.hosts,
            config=text,
            plan=_no_plan,
            say=say,
            show=say,
            **reach(request.hosts.in_order, inspected),
        )
        Session(order, engine).visit(work)
    if trouble := keep(cache_path(config, hosts[0]), found[0]):
        say(trouble)
    return found[0], False


def _no_plan(session: Session) -> NoReturn:
    raise AssertionError("a visit trains nothing")


def _survey(session: Session, backend: str, *, again: bool, say: Callable[[str], None]) -> Machines:
    names = [place_name(place) for place in session.places]
    count = len(names)
    say(f"{count} host{'s' if count > 1 else ''}: racing and timing, all at the same time")
    answers = session.measure(again=again)
    hosts = tuple(_named(session, node, found) for node, found in sorted(answers.items()))
    links: list[Link] = []
    curves: list[AllReduceCurve] = []
    if count > 1:
        # MPI can be started only once in an agent's life, Gloo as often as one likes.
        for kind in dict.fromkeys(("gloo", backend)):
            say(f"the network between them, over {kind}")
            parts = session.links(names, kind)
            # Links are Gloo's: our MPI sends and receives single messages one after another,
            # so that both ways at once would look like half of what the wire carries. The
            # curve of the backend in use stands first.
            links = links or [link for part in parts for link in part.links]
            curves[:0] = [curve for part in parts for curve in part.curves]
    return Machines(
        made=datetime.now().astimezone().isoformat(timespec="seconds"),
        workload=answers[0].workload,
        hosts=hosts,
        links=tuple(links),
        curves=tuple(curves),
        warnings=tuple(f"{host.name}: {text}" for host in hosts for text in host.warnings),
    )


def _named(session: Session, node: int, found: Machines) -> MeasuredHost:
    """A host's own account, under the name and with the cores that the launcher gives it."""
    place, host = session.places[node], found.hosts[0]
    kept = place.host.slots > 1 or place.host.cores is not None
    cores = tuple(session.ready[node]["cores"]) if kept else ()
    return dataclasses.replace(
        host,
        name=place_name(place),
        node=dataclasses.replace(host.node, host=place.host.name, cores=cores),
    )


def measure_this(
    config: Config, *, again: bool, quiet: bool, say: Callable[[str], None]
) -> tuple[Machines, bool]:
    """This machine alone, raced and its winner profiled; True when all came from the cache."""
    from paceline.hardware.profile import ProfileRequest, profile
    from paceline.workflow.race import RaceRequest, race_safely, time_sizes

    speak = (lambda text: None) if quiet else say
    batch = config.workload.global_batch(1)
    race, raced_before = race_safely(
        RaceRequest(config=config, batch_size=batch, again=again, quiet=quiet, say=speak)
    )
    chosen = next(entry for entry in race.candidates if entry.chosen)
    request = ProfileRequest(
        config=config,
        batch_size=batch,
        chosen=chosen,
        time_sizes=time_sizes,
        again=again,
        say=speak,
    )
    found, profiled_before = profile(request)
    return found, raced_before and profiled_before


def doubts(found: Machines) -> list[str]:
    """Sentences on why these measurements may be wrong."""
    lines = list(found.warnings)
    if not lines:
        lines = [f"{host.name}: {text}" for host in found.hosts for text in host.warnings]
    busy = [host.name for host in found.hosts if host.is_doubtful]
    if busy:
        lines.append(f"measure again with --again when {', '.join(busy)} has nothing else to do")
    return lines


_PLANS_VERSION = 2


def plan_machines(config: Config, machines: Machines) -> tuple[Plan, list[str]]:
    """The plan for measured machines, with lines for people; kept, since it follows from them."""
    factors = calibration()
    place = place_of("plans", key_of([_PLANS_VERSION, encode(config), encode(machines), factors]))
    if (known := kept(ExplainedPlan, place)) is not None:
        return known.plan, list(known.lines)
    plan, lines = choose(config, machines, factors)
    keep(place, ExplainedPlan(plan=plan, lines=tuple(lines)))
    return plan, lines
