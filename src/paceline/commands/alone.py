"""A training on this machine by a plan that was asked for: prove it, and train by nothing else.

A part of `api`, kept apart for its length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import UserError
from paceline.plan import asked_node, asked_plan
from paceline.run import RunDirectory
from paceline.schema import Plan, write_json

if TYPE_CHECKING:
    from paceline.api import Result, Start


def train_alone(start: Start) -> Result:
    """Train as the plan says, or with the strategy that the configuration names."""
    return _train(start, start.plan if start.plan is not None else _asked(start))


def _asked(start: Start) -> Plan:
    from paceline.local.cores import usable_cores

    own = start.given is not None and start.given.optimizer is not None
    elementwise = not own and ":" not in start.config.optimizer.name
    node = asked_node(start.config.local, usable_cores(), elementwise=elementwise)
    return asked_plan(start.config, node, f"local.strategy = {node.strategy!r} was asked for")


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
