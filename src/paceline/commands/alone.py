"""The chain of stages on this machine alone: race, plan, prove, train.

A part of `api`, kept apart for its length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import ProofError, UserError
from paceline.plan import (
    asked_node,
    asked_plan,
    plan_from_race,
    refuse_options_without_strategy,
)
from paceline.run import RunDirectory
from paceline.schema import Plan, Race, read_json, write_json
from paceline.schema.proof import Proof

if TYPE_CHECKING:
    from paceline.api import Result, Start


def train_alone(start: Start) -> Result:
    """Train as the plan says, as asked, or as the race finds.

    A plan of the race's that fails its proof costs its own seconds: the next best is taken. What
    the user asked for is trained or refused.
    """
    if start.plan is not None:
        return _train(start, start.plan)
    if start.config.local.strategy != "auto":
        return _train(start, _asked(start))
    found = _raced(start)
    while True:
        try:
            return _train(start, plan_from_race(start.config, found))
        except ProofError as error:
            found = _next_best(start, found, error)


def _asked(start: Start) -> Plan:
    from paceline.local.cores import usable_cores

    own = start.given is not None and start.given.optimizer is not None
    elementwise = not own and ":" not in start.config.optimizer.name
    node = asked_node(start.config.local, usable_cores(), elementwise=elementwise)
    return asked_plan(start.config, node, f"local.strategy = {node.strategy!r} was asked for")


def _raced(start: Start) -> Race:
    """What the race finds, or has found before."""
    from paceline import api

    refuse_options_without_strategy(start.config.local)
    found, cached = api.race(
        start.config, given=start.given, again=start.again, quiet=start.silent, say=start.say
    )
    write_json(start.run.race, found)
    for warning in found.warnings:
        start.say(f"warning: {warning}")
    start.say(f"{'race (from the cache)' if cached else 'race'}: {found.decision}")
    return found


def _next_best(start: Start, found: Race, error: ProofError) -> Race:
    """The race without the choice that has failed its proof; kept like the race."""
    from paceline.measure.choice import without
    from paceline.measure.race import keep

    stored = start.run.path / "proof.json"
    try:
        proof = read_json(Proof, stored)
    except UserError:  # another rank failed before the first one came to write
        proof = Proof(reason=str(error), cause="plan")
    found = without(found, proof, start.config)
    write_json(start.run.race, found)
    if start.given is None:
        keep(found, start.say)
    start.say(f"{error}; taken instead: {found.decision}")
    stored.unlink(missing_ok=True)
    return found


def _train(start: Start, plan: Plan) -> Result:
    from paceline.api import Result, summary_of

    run = start.run
    if len(plan.nodes) > 1:
        raise UserError(
            f"the plan has {len(plan.nodes)} nodes, but only this machine was given: name the hosts"
            " with --hosts, or leave the plan out to make a new one"
        )
    write_json(run.plan, plan)
    node = plan.nodes[0]
    if not node.shares_memory:
        from paceline.train.assemble import Task
        from paceline.train.loop import train
        from paceline.train.progress import make_view

        task = Task(
            config=start.config,
            plan=plan,
            run=run,
            given=start.given,
            view=make_view(silent=start.silent),
        )
        outcome = train(task)
        return Result(run=run.path, summary=outcome.summary, exit_code=outcome.exit_code)
    from paceline.launch.local import run_ranks

    code = run_ranks(RunDirectory(run.path.resolve()), node, silent=start.silent)
    return Result(run=run.path, summary=summary_of(run), exit_code=code)


__all__ = ["train_alone"]
