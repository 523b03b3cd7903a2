"""One node's part of a run that spans several: in this process, or in ranks of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.config import load_config
from paceline.hardware.instructions import use_safe_instructions
from paceline.launch.rank import Rank, record_failure, train_rank
from paceline.run import RunDirectory
from paceline.schema import Plan, RankContext, read_json

if TYPE_CHECKING:
    from paceline.local.board import Board


def node_context(plan: Plan, context: RankContext) -> RankContext:
    """The place of a node's first rank among the ranks of all nodes."""
    node = plan.nodes[context.node]
    return dataclasses.replace(
        context,
        rank=sum(earlier.ranks for earlier in plan.nodes[: context.node]),
        world_size=sum(every.ranks for every in plan.nodes),
        local_rank=0,
        local_size=node.ranks,
        nodes=len(plan.nodes),
    )


def _plan(run: RunDirectory, node: int, servers: int) -> Plan:
    """The run's plan; a node that joins a training has one of its own, for once."""
    own = run.path / f"node-{node}" / "plan.json"
    if not own.exists():
        return read_json(Plan, run.plan).with_servers(servers, node)
    plan = read_json(Plan, own)
    own.unlink()
    return plan


def run_node(
    run: RunDirectory,
    context: RankContext,
    *,
    silent: bool = False,
    watch: Callable[[Board], None] | None = None,
) -> int:
    """Train node `context.node` of the run's plan to its end; the exit code of its first rank.

    `watch` gets the board on which the node's ranks say what they are doing.
    """
    config = load_config(run.config)
    plan = _plan(run, context.node, config.exchange.servers)
    context = node_context(plan, context)
    node = plan.nodes[context.node]
    if plan.precision == "bf16":
        use_safe_instructions(config, all_numerics=True)
    if node.shares_memory:
        from paceline.launch.local import run_ranks

        return run_ranks(run, node, silent=silent, context=context, watch=watch)
    from paceline.local.cores import pin

    if node.cores:
        pin(node.cores)
    from paceline.local.board import own_board
    from paceline.local.memory import keep_freed_memory

    keep_freed_memory()  # before the threads that watch the board
    board = own_board(config.train.deadline)
    if watch is not None:
        watch(board)
    board.start_heartbeat()
    try:
        return train_rank(
            Rank(config=config, plan=plan, run=run, context=context, board=board, silent=silent)
        )
    except BaseException as error:
        record_failure(run, context, error, is_passed_on=True)
        raise
    finally:
        board.close()
