"""A training over several nodes in legs, from the node that leads it.

It begins at once on the first node, or with what was fastest in the training before, and finds out
while it trains which nodes are worth having and how they agree. Every node's process is started
once and stays to the end; those that a leg does not need sleep.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import load_config
from paceline.config.cache import keep, kept, key_of, place_of
from paceline.hardware.instructions import use_safe_instructions
from paceline.hardware.kept_races import fingerprint
from paceline.plan.pilot import learned
from paceline.plan.teams import labels
from paceline.run import RunDirectory
from paceline.schema import Config, Plan, RankContext, encode, read_json, write_json
from paceline.schema.legs import Broken, Leg, LegsOrder, Lesson
from paceline.workflow.alone import legs_before
from paceline.workflow.connections import joined
from paceline.workflow.crewed import Crewed
from paceline.workflow.hosts_training import HostsTraining
from paceline.workflow.legs import LegsRequest
from paceline.workflow.nodes import BEGINS_TOGETHER, Node, follow
from paceline.workflow.runners import Began, Home
from paceline.workflow.together import Together, dismiss

if TYPE_CHECKING:
    from paceline.local.board import Board
    from paceline.training.loop import Outcome
    from paceline.training.progress import View


def run_legs(
    run: RunDirectory,
    context: RankContext,
    order: LegsOrder,
    *,
    silent: bool = False,
    watch: Any = None,
) -> int:
    """One node's part of a training in legs, to its end; the exit code.

    plan.json of the run says what every node is. `watch` gets the board on which this node says
    what it is doing.
    """
    from paceline.local.board import own_board
    from paceline.local.cores import pin
    from paceline.local.memory import keep_freed_memory

    own_plan = run.path / f"node-{context.node}" / "plan.json"
    config = load_config(run.config)
    everyone = read_json(Plan, own_plan if order.joins else run.plan)
    use_safe_instructions(config, all_numerics="bf16" in config.numerics.allow)
    mine = everyone.nodes[context.node]
    if mine.cores:
        pin(mine.cores)
    keep_freed_memory()  # before the threads that watch the board
    board = own_board(config.train.deadline)
    if watch is not None:
        watch(board)
    board.start_heartbeat()
    context = dataclasses.replace(
        context, rank=context.node, world_size=context.nodes, local_rank=0, local_size=1
    )
    try:
        return _with_board(_Begun(config, run, context, order, everyone, board), silent=silent)
    finally:
        board.close()


@dataclass(frozen=True)
class _Begun:
    """What a node's process begins with."""

    config: Config
    run: RunDirectory
    context: RankContext
    order: LegsOrder
    everyone: Plan
    board: Board


def _with_board(begun: _Begun, *, silent: bool) -> int:
    from paceline.observe.samples import process_began
    from paceline.training.assemble import Task
    from paceline.training.device import use_deterministic
    from paceline.training.parts import make_parts
    from paceline.training.progress import SilentView, make_view
    from paceline.training.watching import recording

    config, context = begun.config, begun.context
    own = time.time() - process_began()  # imports, too
    began = time.perf_counter() - own - begun.order.elapsed
    use_deterministic(config.train.deterministic)
    leads = context.node == 0
    view: View = make_view(silent=silent) if leads else SilentView()
    opening = time.perf_counter()
    parts = make_parts(config)
    opened = time.perf_counter() - opening
    hosts = labels(begun.everyone)
    task = Task(config=config, plan=begun.everyone, run=begun.run, context=context, view=view)
    try:
        with (
            recording(task) as recorder,
            joined(context, hosts, deadline=config.train.deadline, late=begun.order.joins) as (
                network,
                crew,
            ),
        ):
            node = Node(
                config=config,
                run=begun.run,
                context=context,
                network=network,
                crew=crew,
                board=begun.board,
                parts=parts,
                recorder=recorder,
                view=view,
                silent=silent,
            )
            try:
                if not leads:
                    recorder.ready()
                    return follow(node, _part_of(begun.everyone, context.node), _arrival(begun))
                home = Home(
                    config=config,
                    run=begun.run,
                    parts=parts,
                    given=None,
                    view=view,
                    recorder=recorder,
                    began=began,
                    open_seconds=opened,
                )
                try:
                    code = _lead(begun, node, home).exit_code
                except Exception:
                    dismiss(node)  # whoever sleeps hears that it is over, not that all is lost
                    raise
                dismiss(node)
                return code
            finally:
                node.close()
    finally:
        view.close()
        parts.dataset.close()


def _arrival(begun: _Begun) -> dict[str, Any] | None:
    """What a node says of itself that comes while the others train; None where it begins so."""
    if not begun.order.joins:
        return None
    node = begun.context.node
    return {"node": encode(begun.everyone.nodes[node]), "writes": node in begun.order.writers}


def _part_of(everyone: Plan, node: int) -> Plan:
    """What a node would take of every batch if all trained together."""
    mine = everyone.nodes[node]
    part = everyone.batch_size * mine.share / sum(each.share for each in everyone.nodes)
    return Plan(
        nodes=(dataclasses.replace(mine, share=1.0),),
        precision=everyone.precision,
        memory_format=everyone.memory_format,
        batch_size=max(1, round(part)),
    )


def _lead(begun: _Begun, node: Node, home: Home) -> Outcome:
    """The training, from its first leg to its last."""
    order = begun.order
    place = _lesson_place(begun)
    lesson = (None if order.again else kept(Lesson, place)) or Lesson()
    past = order.goes_on or (order.script[0].plan if order.script else lesson.plan)
    wanted = past or order.start
    if order.script or (wanted is not None and len(wanted.nodes) > 1):
        node.crew.say(BEGINS_TOGETHER, 1.0)  # before all meet to look at the network
    factors = {trait: each for trait, each in lesson.factors.items() if each > 0}
    crewed = Crewed(node, home, begun.everyone, order.writers or (0,), factors)
    building = time.perf_counter()
    name, runner = crewed.first_runner(wanted)
    built = time.perf_counter() - building
    crewed.seen = dataclasses.replace(crewed.seen, setup=built)
    began = _begin(runner)
    home.recorder.ready()
    write_json(home.run.plan, crewed.plans[name])
    earlier = legs_before(home.run, began, crewed.name_of)
    if order.broken is not None:
        earlier = _with_loss(earlier, order.broken, name, crewed.plans[name])
    training = HostsTraining(
        LegsRequest(
            home=dataclasses.replace(home, began=began.started),
            options=crewed.options,
            plans=crewed.plans,
            begun=began,
            began=home.began,
            built_seconds=built,
            earlier=earlier,
            start=name if wanted is not None else None,
            script=order.script,
            verbose=order.verbose,
        ),
        first=(name, runner),
        crewed=crewed,
    )
    outcome = training.run()
    if not order.script:
        _keep_lesson(place, training)
    return outcome


def _with_loss(legs: list[Leg], broken: Broken, name: str, plan: Plan) -> list[Leg]:
    """The legs before a loss that ended all nodes, the last of them with what it has cost."""
    last = legs.pop() if legs else Leg(name=name, plan=plan)
    seconds = max(0.0, time.time() - broken.at)
    lost = dataclasses.replace(last, ended=broken.why, left=broken.left, lost_seconds=seconds)
    return [*legs, lost]


def _begin(runner: Together) -> Began:
    """Begin the training, or go on from its newest checkpoint."""
    trainer = runner.trainer
    newest = trainer.checkpoints.newest()
    if newest is None:
        runner.begin()
        return Began.of(trainer, {})
    saved = trainer.saved(newest)
    runner.take_over(saved)
    trainer.welcome_back(saved)
    return Began.of(trainer, saved.state.plan)


def _lesson_place(begun: _Begun) -> Path:
    """Where the cache of the first node keeps what trainings over these nodes have taught."""
    nodes = [[node.host, node.threads, list(node.cores)] for node in begun.everyone.nodes]
    hosts = key_of([nodes, begun.context.backend])
    return place_of("lessons", f"{fingerprint(begun.config, begun.everyone.batch_size)}-{hosts}")


def _keep_lesson(place: Path, training: HostsTraining) -> None:
    known = training.known
    if known.legs:
        best, options = known.legs[-1].best, training.crewed.options
        ways = {training.crewed.entry(option.name)[0].name for option in options}
        factors = {trait: each for trait, each in learned(known).items() if trait not in ways}
        keep(place, Lesson(best=best, plan=training.plans[best], factors=factors))
