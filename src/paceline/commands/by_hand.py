"""`mpiexec -n 4 paceline train ...`, torchrun or srun: each started process is one node.

A part of `api`. The first process makes the run directory and the plan and tells the others.
"""

from __future__ import annotations

import dataclasses
import platform
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import dump_config
from paceline.config.environment import Started
from paceline.errors import PacelineError, ProofError, UserError
from paceline.launch.meeting import Meeting, open_meeting
from paceline.local.cores import divide_cores, pin, usable_cores, visible_cores
from paceline.plan import refuse_options_without_strategy
from paceline.plan.together import NodeSite, plan_as_asked, plan_from_races, race_batches
from paceline.run import RunDirectory
from paceline.schema import Config, Plan, Race, RankContext, decode, encode, write_json
from paceline.secure.sealing import new_secret
from paceline.workflow.partitioning import partitioned
from paceline.workflow.training import Result, counted_from_enter, earlier_seconds, summary_of

if TYPE_CHECKING:
    from paceline.workflow.training import Start

MARKER = ".launch"


def train_by_hand(started: Started, begin: Callable[[], Start]) -> Result | None:
    """Train as one of several processes; what came of it on the first, None on the others.

    `begin` makes the run directory; only the first process calls it.
    """
    meeting = open_meeting(started)
    try:
        return _meet(meeting, begin)
    finally:
        meeting.close()


def _meet(meeting: Meeting, begin: Callable[[], Start]) -> Result | None:
    start: Start | None = None
    opening: dict[str, Any] = {}
    if meeting.rank == 0:
        try:
            start = begin()
            opening = _opening(start)
        except PacelineError as error:
            meeting.share({"error": str(error)})
            raise
    opening = meeting.share(opening)
    if "error" in opening:  # the first process says it
        raise SystemExit(UserError.exit_code)
    try:
        return _work(meeting, start, opening)
    except UserError as error:
        if start is None and isinstance(error, ProofError):
            raise SystemExit(error.exit_code) from None  # all have it; the first process says it
        if start is not None:
            start.run.discard()
        raise
    finally:
        if start is not None:
            (start.run.path / MARKER).unlink(missing_ok=True)
            start.run.unlock()


def _work(meeting: Meeting, start: Start | None, opening: dict[str, Any]) -> Result | None:
    config = decode(Config, opening["config"])
    site = _own_site(meeting)
    plan = _plan(meeting, start, config, site, opening)
    address, port = meeting.rendezvous()
    several = any(node.ranks > 1 for node in plan.nodes)
    context = RankContext(
        node=meeting.rank,
        nodes=meeting.size,
        address=address,
        port=port,
        # MPI belongs to this process: ranks that it starts itself cannot speak it.
        backend="gloo" if several else meeting.backend,
        secret=opening["secret"],
    )
    return _train(meeting, start, config, plan, context, opening)


def _opening(start: Start) -> dict[str, Any]:
    if start.plan is None and start.config.local.strategy == "auto":
        refuse_options_without_strategy(start.config.local)
    marker = secrets.token_hex(16)
    (start.run.path / MARKER).write_text(marker)
    return {
        "config": encode(start.config),
        "run": str(start.run.path.resolve()),
        "marker": marker,
        "plan": encode(start.plan) if start.plan is not None else None,
        "again": start.again,
        "secret": new_secret(),
    }


def _own_site(meeting: Meeting) -> NodeSite:
    """This process's part of its host; cores that the launcher has not divided are divided here."""
    mine = [platform.node(), list(visible_cores())]
    everyone = meeting.gather(mine)
    alike = [rank for rank, other in enumerate(everyone) if other == mine]
    cores = visible_cores()
    if len(alike) > 1:
        cores = divide_cores(cores, len(alike), alike.index(meeting.rank))
        pin(cores)
    usable = min(usable_cores(), len(cores))
    return NodeSite(host=platform.node(), usable=usable, cores=cores if len(alike) > 1 else ())


def _plan(
    meeting: Meeting, start: Start | None, config: Config, site: NodeSite, opening: dict[str, Any]
) -> Plan:
    """The same plan on every process."""
    sites = [decode(NodeSite, each) for each in meeting.gather(encode(site))]
    if opening["plan"] is not None:
        plan = decode(Plan, opening["plan"])
        if len(plan.nodes) != meeting.size:
            raise UserError(
                f"the plan has {len(plan.nodes)} nodes, but {meeting.size} processes were started"
            )
        return plan
    if config.local.strategy != "auto":
        asked = plan_as_asked(config, sites, elementwise=":" not in config.optimizer.name)
        return _split(meeting, config, asked)
    from paceline import api

    batch = race_batches(config, sites)[meeting.rank]
    work = dataclasses.replace(config.workload, batch_size=batch, batch_per_worker=None)
    mine, _ = api.race(
        dataclasses.replace(config, workload=work), again=opening["again"], quiet=True
    )
    races = {rank: decode(Race, each) for rank, each in enumerate(meeting.gather(encode(mine)))}
    if start is not None:
        for rank, race in races.items():
            write_json(start.run.path / f"race-{sites[rank].host}-{rank}.json", race)
    return _split(meeting, config, plan_from_races(config, sites, races))


def _split(meeting: Meeting, config: Config, plan: Plan) -> Plan:
    """The plan with the layers that are split over nodes, as the first process finds them."""
    if config.exchange.partition == "none":
        return plan
    found: dict[str, Any] = {}
    if meeting.rank == 0:
        try:
            found = {"plan": encode(partitioned(config, plan))}
        except PacelineError as error:
            meeting.share({"error": str(error)})
            raise
    found = meeting.share(found)
    if "error" in found:  # the first process says it
        raise SystemExit(UserError.exit_code)
    return decode(Plan, found["plan"])


def _train(
    meeting: Meeting,
    start: Start | None,
    config: Config,
    plan: Plan,
    context: RankContext,
    opening: dict[str, Any],
) -> Result | None:
    from paceline.launch.node import run_node

    if start is not None:
        write_json(start.run.plan, plan)
        start.say(f"{meeting.size} nodes, over {context.backend}")
        meeting.share(True)
        meeting.close()
        earlier = earlier_seconds(start.run)
        code = run_node(RunDirectory(start.run.path.resolve()), context, silent=start.silent)
        result = Result(run=start.run.path, summary=summary_of(start.run), exit_code=code)
        return counted_from_enter(start, result, earlier=earlier)
    meeting.share()
    meeting.close()
    path = Path(opening["run"])
    marker = path / MARKER
    if marker.is_file() and marker.read_text() == opening["marker"]:
        run_node(RunDirectory(path), context, silent=True)
        return None
    with tempfile.TemporaryDirectory(prefix="paceline-node-") as folder:
        run = RunDirectory(Path(folder))
        run.config.write_text(dump_config(config))
        write_json(run.plan, plan)
        run_node(run, context, silent=True)
    return None


__all__ = ["train_by_hand"]
