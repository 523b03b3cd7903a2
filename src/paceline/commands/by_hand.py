"""`mpiexec -n 4 paceline train ...`, torchrun or srun: each started process is one node.

A part of `api`. The first process makes the run directory and the plan and tells the others.
"""

from __future__ import annotations

import dataclasses
import platform
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import dump_config
from paceline.config.environment import Started
from paceline.errors import PacelineError, ProofError, UserError
from paceline.launch.rendezvous import StartRendezvous, open_meeting
from paceline.local.cores import divide_cores, pin, usable_cores, visible_cores
from paceline.plan import refuse_foreign_options
from paceline.plan.together import NodeSite, first_plan, trains_in_legs
from paceline.run import RunDirectory
from paceline.schema import Config, Plan, RankContext, decode, encode, write_json
from paceline.schema.legs import LegsOrder
from paceline.secure.sealing import new_secret
from paceline.workflow.partitioning import partitioned
from paceline.workflow.training import Result, counted_from_enter, earlier_seconds, summary_of

if TYPE_CHECKING:
    from paceline.workflow.training import TrainingStart

MARKER = ".launch"


def train_by_hand(started: Started, begin: Callable[[], TrainingStart]) -> Result | None:
    """Train as one of several processes; what came of it on the first, None on the others.

    `begin` makes the run directory; only the first process calls it.
    """
    meeting = open_meeting(started)
    try:
        return _meet(meeting, begin)
    finally:
        meeting.close()


def _meet(meeting: StartRendezvous, begin: Callable[[], TrainingStart]) -> Result | None:
    start: TrainingStart | None = None
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


def _work(
    meeting: StartRendezvous, start: TrainingStart | None, opening: dict[str, Any]
) -> Result | None:
    config = decode(Config, opening["config"])
    plan, legs = _plan(meeting, config, _own_site(meeting), opening)
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
    return _train(meeting, start, config, plan, _Way(context, legs), opening)


@dataclass(frozen=True)
class _Way:
    """How a process trains: its place, and what leads it if that is done in legs."""

    context: RankContext
    legs: LegsOrder | None

    def run(self, run: RunDirectory, *, silent: bool) -> int:
        if self.legs is not None:
            from paceline.workflow.hosts import run_legs

            return run_legs(run, self.context, self.legs, silent=silent)
        from paceline.launch.node import run_node

        return run_node(run, self.context, silent=silent)


def _opening(start: TrainingStart) -> dict[str, Any]:
    if start.plan is None and start.config.local.strategy == "auto":
        refuse_foreign_options(start.config.local)
    fixed = start.fixed or not start.run.legs.exists()
    marker = secrets.token_hex(16)
    (start.run.path / MARKER).write_text(marker)
    return {
        "config": encode(start.config),
        "run": str(start.run.path.resolve()),
        "marker": marker,
        "goes_on": not start.fixed and not start.run.is_new,
        "plan": encode(start.plan) if start.plan is not None and fixed else None,
        "legs": encode(
            LegsOrder(
                goes_on=start.plan,
                script=tuple(start.script),
                verbose=start.verbose,
                again=start.again,
                elapsed=time.perf_counter() - start.began,
            )
        ),
        "secret": new_secret(),
    }


def _own_site(meeting: StartRendezvous) -> NodeSite:
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
    meeting: StartRendezvous, config: Config, site: NodeSite, opening: dict[str, Any]
) -> tuple[Plan, LegsOrder | None]:
    """The same plan on every process, and what leads them if it may change on the way."""
    sites = [decode(NodeSite, each) for each in meeting.gather(encode(site))]
    if opening["plan"] is not None:
        plan = decode(Plan, opening["plan"])
        if len(plan.nodes) != meeting.size and opening["goes_on"]:
            opening = opening | {"plan": None}
            return _plan(meeting, config, site, opening)
        if len(plan.nodes) != meeting.size:
            raise UserError(
                f"the plan has {len(plan.nodes)} nodes, but {meeting.size} processes were started"
            )
        return plan, None
    plan = first_plan(config, sites, elementwise=":" not in config.optimizer.name)
    sees = meeting.gather(_sees_run(opening))
    legs = dataclasses.replace(
        decode(LegsOrder, opening["legs"]),
        writers=tuple(rank for rank, each in enumerate(sees) if each),
    )
    if legs.script or trains_in_legs(config, plan):
        return plan, legs
    return _split(meeting, config, plan), None


def _sees_run(opening: dict[str, Any]) -> bool:
    """Whether the first process's run directory is here too."""
    marker = Path(opening["run"]) / MARKER
    return marker.is_file() and marker.read_text() == opening["marker"]


def _split(meeting: StartRendezvous, config: Config, plan: Plan) -> Plan:
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
    meeting: StartRendezvous,
    start: TrainingStart | None,
    config: Config,
    plan: Plan,
    way: _Way,
    opening: dict[str, Any],
) -> Result | None:
    if start is not None:
        write_json(start.run.plan, plan)
        start.say(f"{meeting.size} nodes, over {way.context.backend}")
        meeting.share(True)
        meeting.close()
        earlier = earlier_seconds(start.run)
        code = way.run(RunDirectory(start.run.path.resolve()), silent=start.silent)
        result = Result(run=start.run.path, summary=summary_of(start.run), exit_code=code)
        return counted_from_enter(start, result, earlier=earlier)
    meeting.share()
    meeting.close()
    if _sees_run(opening):
        way.run(RunDirectory(Path(opening["run"])), silent=True)
        return None
    with tempfile.TemporaryDirectory(prefix="paceline-node-") as folder:
        run = RunDirectory(Path(folder))
        run.config.write_text(dump_config(config))
        write_json(run.plan, plan)
        way.run(run, silent=True)
    return None
