"""The chain of stages over several machines: check, start, plan, train.

A part of `api`, kept apart for its length and because one machine needs none of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from paceline.config import dump_config
from paceline.errors import (
    ConfigError,
    DeadlineError,
    LostError,
    StrategyError,
    UnsupportedError,
    UserError,
)
from paceline.launch.collect import newest_here
from paceline.launch.engines import Engine, engine_class, finds_hosts
from paceline.launch.inspection import (
    Inspection,
    check_hosts,
    inspect_hosts,
    is_off,
    wanted_facts,
)
from paceline.launch.session import HostOrder, Session
from paceline.launch.ssh import is_here
from paceline.plan import refuse_foreign_options
from paceline.plan.measured import foresee
from paceline.plan.together import NodeSite, first_plan, trains_in_legs
from paceline.schema import Plan
from paceline.schema.legs import LegsOrder
from paceline.schema.support import check_support
from paceline.workflow.calibration import calibration
from paceline.workflow.clusters import on_cluster
from paceline.workflow.machines import kept_machines, place_name, plan_machines
from paceline.workflow.partitioning import partitioned
from paceline.workflow.restarts import Restarts, on_those_left

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.api import HostsRequest, TrainingStart
    from paceline.schema import Config
    from paceline.schema.hosts import Host, Hosts


def train_on_hosts(start: TrainingStart) -> int:
    """Train on the hosts of `start`; the exit code of the first node.

    A loss that ends all nodes costs what was done since the newest checkpoint: they are started
    again, on the hosts that are left.
    """
    restarts = Restarts(start)
    while True:
        session = make_session(start)
        try:
            return session.run()
        except (LostError, DeadlineError) as error:
            start = restarts.after(session, error, start)


def make_session(start: TrainingStart) -> Session:
    """The hosts checked, the engine chosen: nothing is started yet."""
    assert start.hosts is not None
    if finds_hosts(start.hosts.engine):
        return on_cluster(start, _session)
    start, found, absent = _with_those_present(start)
    return _session(start, found, absent)


def _session(
    start: TrainingStart,
    found: Inspection | None,
    absent: tuple[Host, ...] = (),
    engine: Engine | None = None,
) -> Session:
    """`engine`: one that has found its hosts itself."""
    request = start.hosts
    assert request is not None
    names = [place.host.name for place in request.hosts.places]
    chosen_here = request.engine.partition(":")[0] != "slurm"
    start = with_plan_for(start, names if chosen_here else len(names))
    fixed = start.plan is not None and (start.fixed or not start.run.legs.exists())
    if start.plan is not None and fixed:
        hosts = hosts_of_plan(request.hosts, start.plan)
        used = {host.name for host in hosts.host}
        if left := [host.name for host in request.hosts.host if host.name not in used]:
            start.say(f"the plan leaves {', '.join(left)} out")
        request = dataclasses.replace(request, hosts=hosts)
    if start.plan is None and start.config.local.strategy == "auto":
        refuse_foreign_options(start.config.local)
    if start.fixed and chosen_here and engine is None:
        found = check_hosts(request.hosts.in_order, start.config)
    for warning in found.warnings() if found is not None and start.broken is None else ():
        start.say(f"warning: {warning}")
    if request.engine == "auto" and start.config.exchange.kind == "parameter_server":
        # Over MPI the loss of one worker ends all; over Gloo the others go on.
        request = dataclasses.replace(request, engine="ssh")
    engine = engine or choose_engine(request, found)
    if request.engine == "torchrun:c10d":
        start.say(
            "warning: torchrun's c10d rendezvous runs what anybody on the network puts into its"
            " store: use --engine ssh where you do not trust all who can reach it"
        )
    nodes = len(request.hosts.places)
    if start.broken is None:
        start.say(f"{nodes} node{'s' if nodes > 1 else ''} by {engine.name}, over {engine.backend}")
    order = HostOrder(
        run=start.run,
        hosts=request.hosts,
        config=dump_config(start.config),
        plan=lambda session: plan_nodes(start, session, fixed=fixed),
        continues=not start.run.is_new if start.broken is None else newest_here(start.run.path) > 0,
        silence=start.config.train.silence,
        absent=absent,
        silent=start.silent,
        say=start.say,
        show=start.show,
        **reach(request.hosts.in_order, found),
    )
    return Session(order, engine)


def _with_those_present(
    start: TrainingStart,
) -> tuple[TrainingStart, Inspection | None, tuple[Host, ...]]:
    """The hosts that answer, what they said, and workers that are off: a line says so of each.

    Anything else that is wrong with a host is refused. Hosts of a plan that was asked for, and
    those that Slurm chooses, are left as they are.
    """
    request = start.hosts
    assert request is not None
    if start.broken is not None:
        return on_those_left(start, start.broken)
    if start.fixed or request.engine.partition(":")[0] == "slurm":
        return start, None, ()
    hosts = request.hosts
    found = inspect_hosts(hosts.in_order, wanted_facts(start.config))
    off = {name for name, why in found.failures.items() if is_off(why)}
    absent = tuple(host for host in hosts.host if host.name in off and host.role == "worker")
    if len(absent) == len(hosts.host):
        absent = ()
    for host in absent:
        why = found.failures.pop(host.name)
        start.say(f"warning: host {host.name} does not answer: {why}; training begins without it")
    if problems := found.problems():
        raise UserError("\n".join(problems))
    present = tuple(host for host in hosts.host if host not in absent)
    request = dataclasses.replace(request, hosts=dataclasses.replace(hosts, host=present))
    return dataclasses.replace(start, hosts=request), found, absent


def with_plan_for(start: TrainingStart, hosts: Sequence[str] | int) -> TrainingStart:
    """A run that goes on keeps its plan where that is of these hosts; else it is planned anew.

    `hosts`: one name per node, or only how many nodes there are. A plan that was asked for by name
    is left as it is, and refused later where it does not fit.
    """
    plan = start.plan
    if plan is None or start.fixed or start.run.is_new or start.run.legs.exists():
        return start
    of_plan = [node.host for node in plan.nodes]
    if isinstance(hosts, int):
        fits = len(of_plan) == hosts
    else:
        used = [host for host in hosts if host in set(of_plan)]
        nameless = set(of_plan) == {"localhost"} and len(of_plan) == len(hosts)
        fits = used == of_plan or nameless
    if fits:
        return start
    start.say(
        f"the run was trained by {len(of_plan)} node{'s' if len(of_plan) > 1 else ''}"
        f" ({', '.join(dict.fromkeys(of_plan))}): it goes on with a new plan for these hosts"
    )
    return dataclasses.replace(start, plan=None)


def choose_engine(request: HostsRequest, found: Inspection | None) -> Engine:
    """The engine that was asked for; "auto" takes MPI where every host has the same one."""
    name, _, option = request.engine.partition(":")
    if name == "auto":
        possible = found is not None and mpi_obstacle(found, request.hosts.in_order) is None
        name = "mpi" if possible else "ssh"
    if (
        name == "mpi"
        and found is not None
        and (obstacle := mpi_obstacle(found, request.hosts.in_order))
    ):
        raise UserError(f"engine 'mpi' cannot be used: {obstacle}; or use --engine ssh")
    cls: Any = engine_class(name)
    if name == "slurm" or finds_hosts(name):
        engine: Engine = cls(*([request.options] if name == "slurm" else request.options))
    elif option:
        if name != "torchrun":
            raise UnsupportedError(f"engine {name!r} has no option {option!r}: leave it out")
        engine = cls(option)
    else:
        engine = cls()
    return engine


def mpi_obstacle(found: Inspection, hosts: Sequence[Host]) -> str | None:
    """Why MPI cannot join the hosts, in one sentence, or None."""
    here = [host.name for host in hosts if is_here(host.network_address)]
    if len(here) > 1:
        return f"{' and '.join(here)} are one machine, which mpiexec takes under one name only"
    from paceline.launch.mpi import find_mpiexec

    mpiexec = find_mpiexec()
    if mpiexec is None:
        return "there is no mpiexec here: pip install 'paceline[mpi]' brings one"
    for name, facts in found.facts.items():
        if facts["mpi"] is None:
            return f"host {name} has no mpi4py with an MPI: pip install 'paceline[mpi]' there"
    library = found.mpi()
    if library is None:
        kinds = ", ".join(f"{facts['mpi']} on {name}" for name, facts in found.facts.items())
        return f"the hosts have different MPIs ({kinds}): install the same on all"
    if not library.startswith(mpiexec.kind):
        return f"mpiexec here is of {mpiexec.kind}, but mpi4py uses {library}: install one of them"
    return None


def reach(hosts: tuple[Host, ...], found: Inspection | None) -> dict[str, Any]:
    """What joins the hosts: as hosts.toml says, else as the checks found."""
    if found is None:
        return {}
    named = {host.interface for host in hosts}
    by_hand = named.pop() if len(named) == 1 else None
    loopback = by_hand == "lo"
    return {
        "network": None if by_hand else found.network,
        "interface": (None if loopback else by_hand) or found.interface,
        "store_port": found.facts[hosts[0].name]["free_port"],
    }


def plan_nodes(
    start: TrainingStart, session: Session, *, fixed: bool
) -> tuple[Plan, LegsOrder | None]:
    """The plan for the agents that have come, and what leads them if it may change on the way.

    `fixed`: what `start` has was asked for by name.
    """
    config = start.config
    sites = [site_of(session, node) for node in range(len(session.places))]
    if start.plan is not None and fixed:
        plan = foreseen(config, session, _stored_plan(start.plan, sites))
    else:
        plan = first_plan(config, sites, elementwise=":" not in config.optimizer.name)
        more = bool(session.order.absent) and session.engine.backend == "gloo"
        if start.script or trains_in_legs(config, plan, more=more):
            check_support(plan, config.exchange, session.engine.backend)
            return plan, _legs_order(start, session)
        plan = foreseen(config, session, _settled(config, plan))
    check_support(plan, config.exchange, session.engine.backend)
    return plan, None


def _writers(session: Session) -> tuple[int, ...]:
    """Nodes that can write where the first one does."""
    if not session.ready[0]["shared"]:
        return (0,)
    return tuple(node for node, ready in sorted(session.ready.items()) if ready["shared"])


def _legs_order(start: TrainingStart, session: Session) -> LegsOrder:
    """What the first node must know of what was asked for."""
    modelled = None
    machines = kept_machines(start.config, session.hosts)
    if machines is not None:
        with contextlib.suppress(ConfigError, UnsupportedError, StrategyError):
            modelled = plan_machines(start.config, machines)[0]
    return LegsOrder(
        goes_on=start.plan,
        start=modelled,
        writers=_writers(session),
        script=tuple(start.script),
        verbose=start.verbose,
        again=start.again,
        elapsed=time.perf_counter() - start.began,
        broken=start.broken,
    )


def _settled(config: Config, plan: Plan) -> Plan:
    """The plan with its servers, if any, and the layers that are split."""
    return partitioned(config, plan.with_servers(config.exchange.servers))


def site_of(session: Session, node: int) -> NodeSite:
    """One node's place, as planning sees it."""
    place, ready = session.places[node], session.ready[node]
    host = place.host
    kept = host.slots > 1 or host.cores is not None
    return NodeSite(
        host=host.name,
        usable=min(int(ready["usable"]), len(ready["cores"])),
        cores=tuple(ready["cores"]) if kept else (),
        share=None if host.share is None else host.share / host.slots,
        serves=host.role == "server",
    )


def foreseen(config: Config, session: Session, plan: Plan) -> Plan:
    """The plan with what it will take, where these hosts have been measured for this workload."""
    if "exposed_seconds" in plan.predicted:  # `paceline plan` has made it from measurements
        return plan
    found = kept_machines(config, session.hosts)
    if found is None:
        return plan
    names = [place_name(place) for place in session.places]
    try:
        predicted = foresee(config, found, plan, names, calibration())
    except (ConfigError, UnsupportedError):  # other hosts, no link, or a kind without a model
        return plan
    return dataclasses.replace(plan, predicted={**plan.predicted, **predicted})


def hosts_of_plan(hosts: Hosts, plan: Plan) -> Hosts:
    """Those hosts that the plan uses, where it names hosts and leaves some out."""
    used = {node.host for node in plan.nodes}
    kept = tuple(host for host in hosts.host if host.name in used)
    if not kept or len({host.name for host in kept}) < len(used):
        return hosts  # it is of other hosts, which is said when they are compared
    servers = {node.host for node in plan.nodes if node.role == "server"}
    return dataclasses.replace(
        hosts,
        host=tuple(
            dataclasses.replace(host, role="server") if host.name in servers else host
            for host in kept
        ),
    )


def _stored_plan(plan: Plan, sites: list[NodeSite]) -> Plan:
    """A plan given by the user, on the hosts that are there."""
    if len(plan.nodes) != len(sites):
        raise UserError(
            f"the plan has {len(plan.nodes)} nodes, but the hosts give {len(sites)}: one entry of"
            " `nodes` per slot of every host"
        )
    if all(node.host == "localhost" for node in plan.nodes):
        nodes = [
            dataclasses.replace(node, host=site.host)
            for node, site in zip(plan.nodes, sites, strict=True)
        ]
        return dataclasses.replace(plan, nodes=tuple(nodes))
    for node, site in zip(plan.nodes, sites, strict=True):
        if node.host != site.host:
            raise UserError(
                f"the plan has host {node.host!r} where --hosts has {site.host!r}: name the hosts"
                " in the plan's order"
            )
    return plan
