"""From a plan to what one rank trains with: job, exchange, feed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from paceline import exchange, local
from paceline.data.feed import Batch, Feed
from paceline.data.sampler import GlobalSampler, apportion
from paceline.errors import RunDirectoryError, UnsupportedError
from paceline.exchange.agreement import agree_on_files, agree_on_model, rest_of
from paceline.exchange.base import Beginning, Exchange, ExchangeSetting, Memory
from paceline.exchange.memory import ENTRY, gathered, of_node
from paceline.exchange.network import Network
from paceline.exchange.node_sums import NetworkSums
from paceline.exchange.tensor_parallel.layers import Partition
from paceline.exchange.tensor_parallel.splittable import look_at
from paceline.local.base import Job, LocalStrategy, OptimizerState
from paceline.local.board import Arena, Board
from paceline.local.shared import model_digest
from paceline.local.steps import Supervised
from paceline.run import RunDirectory
from paceline.schema import Config, Plan, RankContext
from paceline.schema.checkpoint import check_continued, read_state
from paceline.schema.plain import checked, read_json_file
from paceline.training.checkpoint import Checkpoints
from paceline.training.device import choose_device
from paceline.training.parts import Given, Parts
from paceline.training.progress import SilentView, View
from paceline.training.shares import worker_shares
from paceline.training.team import Team


@dataclass(frozen=True, kw_only=True)
class Task:
    """One rank's part of one run."""

    config: Config
    plan: Plan
    run: RunDirectory
    context: RankContext = dataclasses.field(default_factory=RankContext)
    given: Given | None = None
    board: Board | None = None
    arena: Arena | None = None
    network: Network | None = None
    """The other nodes, on a node's leader; None when there is only one node."""
    view: View = dataclasses.field(default_factory=SilentView)
    checkpoint: Path | None = None
    """What the training goes on from; see `agreed_checkpoint`."""
    ranks_before: int = 0
    """Ranks of the run that are not of this plan: the process that leads a training in legs."""
    rehearsal: bool = False
    """The weights are a copy: nothing is evaluated and nothing kept."""
    in_legs: bool = False
    """A leg over several nodes: which comes next, and with which shares, is decided elsewhere."""
    process_is_new: bool = True
    """False where this process has taken part in a leg of the run before."""


def make_job(task: Task, parts: Parts) -> Job:
    """What the local strategy of this rank's node needs."""
    config, plan = task.config, task.plan
    node = plan.nodes[task.context.node]
    samples = len(parts.dataset.train)
    whole = min(plan.batch_size, samples)
    return Job(
        build_model=lambda: agreed_model(task, parts),
        step=parts.step,
        build_optimizer=parts.build_optimizer,
        elementwise=parts.elementwise,
        node=node,
        context=task.context,
        precision=plan.precision,
        memory_format=plan.memory_format,
        compile=plan.compile,
        device=choose_device(config.train.device, task.context.local_rank),
        clip_norm=config.optimizer.clip_norm,
        seed=config.seed,
        sample_shape=parts.dataset.sample_shape,
        sample_type=_sample_type(task, parts),
        batch_size=max(1, _node_part(task, whole)),
        last_batch=_node_part(task, samples % whole),
        board=task.board,
        arena=task.arena,
        exchange=make_exchange(task),
        partition=make_partition(task, parts),
        nodes=task.context.nodes,
        first_worker=first_worker(plan, task.context.node),
        node_sums=_node_sums(task),
        local_batch_norm=has_local_batch_norm(config, plan),
    )


def has_local_batch_norm(config: Config, plan: Plan) -> bool:
    """Whether BatchNorm may normalise parts of a batch: allowed, or not one process's anyway."""
    workers = [node for node in plan.nodes if node.role == "worker"]
    exact = all(local.strategy_class(node.strategy).synchronous for node in workers)
    if len(plan.nodes) > 1:
        served = plan.servers and config.exchange.mode != "sync"
        exact &= exchange.exchange_class(plan.exchange).synchronous and not served
    return "local_batch_norm" in config.numerics.allow or not exact


def _node_sums(task: Task) -> NetworkSums | None:
    """How nodes add up statistics, on a leader; None where they are connected in pairs alone."""
    if task.network is None or not task.network.is_whole:
        return None
    return NetworkSums(task.network)


def agreed_model(task: Task, parts: Parts) -> nn.Module:
    """A model with the first node's weights and buffers, before anything is made of it.

    Where nodes are connected in pairs alone, the exchange gives them those when it starts.
    """
    model = parts.build_model()
    if task.network is not None and task.network.is_whole:
        agree_on_model(task.network, model)
    return model


def agreed_checkpoint(task: Task) -> Path | None:
    """The checkpoint that this rank goes on from: on every node the first node's newest."""
    newest = Checkpoints(task.run.checkpoints, task.config.train.keep).newest()
    if task.context.nodes == 1:
        return newest
    word = task.run.path / f"node-{task.context.node}" / "resume.json"
    if task.network is not None:
        if task.network.is_whole:
            newest = agree_on_files(task.network, newest, word.parent)
        elif task.context.node > 0 and newest is not None and not _is_of_this_run(task, newest):
            newest = None  # the first node's state comes in its stead
        word.parent.mkdir(exist_ok=True)
        word.write_text(json.dumps(None if newest is None else str(newest)))
    if task.board is not None:  # the node's other ranks read what its leader has found
        task.board.barrier("the checkpoint")
    try:
        found = read_json_file(word)
        return None if found is None else Path(checked(found, str))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{word} is damaged: {error}") from None


def _is_of_this_run(task: Task, checkpoint: Path) -> bool:
    try:
        check_continued(checkpoint, read_state(checkpoint), task.config)
    except RunDirectoryError:
        return False
    return True


def beginning_of(
    strategy: LocalStrategy, update: int, optimizer: OptimizerState | None = None
) -> Beginning:
    """What this node begins with, if it hears of nothing else."""
    model = strategy.model
    return Beginning(
        update=update,
        named=[(name, p) for name, p in model.named_parameters() if p.requires_grad],
        rest=rest_of(model),
        optimizer=optimizer or {},
        load_optimizer=strategy.load_optimizer_state,
        model=model_digest(model),
    )


def make_exchange(task: Task) -> Exchange | None:
    """How this node agrees with the others; None with one node, and on ranks that do not lead."""
    if task.network is None:
        return None
    plan = task.plan
    return exchange.build(
        plan.exchange,
        ExchangeSetting(
            network=task.network,
            options=dataclasses.replace(
                task.config.exchange,
                bucket_mb=task.plan.bucket_mb or task.config.exchange.bucket_mb,
            ),
            shares=tuple(node.share for node in plan.nodes),
            overlap=not plan.nodes[task.context.node].shares_memory,
            saved=lambda: _saved_memory(task),
        ),
    )


def _saved_memory(task: Task) -> Memory:
    """What the newest checkpoint has of this exchange; nothing if there were other nodes then."""
    checkpoints = Checkpoints(task.run.checkpoints, task.config.train.keep)
    newest = task.checkpoint
    entries = {} if newest is None else checkpoints.load(newest)[2].get(ENTRY, {})
    nodes = {key.partition("/")[0] for key in entries}
    return of_node(entries, task.context.node) if len(nodes) == task.context.nodes else {}


def make_partition(task: Task, parts: Parts) -> Partition | None:
    """The layers that are split over nodes; None where every node has all weights."""
    plan = task.plan
    if task.network is None or plan.partition == "none" or not plan.feature_layers:
        return None
    if not parts.elementwise or plan.compile:
        what = "numerics.compile" if plan.compile else "an optimizer of one's own"
        raise UnsupportedError(
            f"{what} needs whole weights on every node: use exchange.partition = 'none'"
        )
    # A model of its own: the one that is trained must not have been run before.
    tried = parts.build_model()
    return Partition(
        task.network,
        plan.feature_layers,
        [node.share for node in plan.nodes],
        plan.batch_size,
        look_at(tried, parts.trial(plan, tried)),
    )


def _node_part(task: Task, count: int) -> int:
    """Samples of a batch of `count` that this rank's node takes, at the plan's shares."""
    return apportion(count, [node.share for node in task.plan.nodes])[task.context.node]


def _sample_type(task: Task, parts: Parts) -> torch.dtype | None:
    """The type of the data's inputs, for strategies that must know it before they read any."""
    if task.plan.nodes[task.context.node].stages == 1:
        return None
    if not isinstance(parts.step, Supervised):
        return None  # such a strategy refuses it
    inputs, _ = parts.dataset.train.fetch(np.arange(1), epoch=0, augment=False)
    return inputs.dtype


def first_worker(plan: Plan, node: int) -> int:
    """The number of a node's first worker among the workers of all nodes."""
    return sum(earlier.workers for earlier in plan.nodes[:node])


def global_sampler(task: Task, parts: Parts) -> GlobalSampler:
    """Which samples every batch of the training has."""
    return GlobalSampler(
        samples=len(parts.dataset.train),
        batch_size=task.plan.batch_size,
        seed=task.config.seed,
        shuffle=task.config.data.shuffle and not parts.dataset.train.ordered,
    )


def make_feed(task: Task, parts: Parts, strategy: LocalStrategy) -> Feed:
    """This rank's way through the training data: its node's share, divided among its workers."""
    return Feed(
        source=parts.dataset.train,
        sampler=global_sampler(task, parts),
        shares=worker_shares(task.plan, [node.share for node in task.plan.nodes]),
        worker=first_worker(task.plan, task.context.node) + strategy.worker,
        least=strategy.least,
        augment=task.config.data.augment,
        reads_inputs=strategy.reads_inputs,
        parts=strategy.parts,
    )


def loss_total(plan: Plan, batch: Batch, shares: Sequence[float], node: int, least: int = 1) -> int:
    """How many samples the loss of a part of `batch` is divided by."""
    if len(plan.nodes) == 1 or not exchange.exchange_class(plan.exchange).own_loss:
        return batch.total
    # As the sampler divides it: first among all workers, whose parts then add up by node.
    parts = apportion(batch.total, worker_shares(plan, list(shares)), least)
    first = first_worker(plan, node)
    return sum(parts[first : first + plan.nodes[node].workers])


def make_whole(task: Task, team: Team, job: Job, strategy: LocalStrategy) -> None:
    """The same weights and buffers on every rank of every node, to evaluate and to save."""
    strategy.prepare_evaluation()
    if task.context.nodes > 1:
        if job.exchange is not None:
            job.exchange.before_evaluation()
        if task.board is not None:  # the node's other ranks see the leader's weights
            task.board.barrier("weights of all nodes")
        team.share_buffers(strategy.model)
        strategy.spread_buffers()


def whole_optimizer_state(job: Job, strategy: LocalStrategy, *, first: bool) -> OptimizerState:
    """The whole optimizer state, wherever it is held; every rank calls it."""
    if job.exchange is not None and first:
        named = [(name, p) for name, p in strategy.model.named_parameters() if p.requires_grad]
        held = job.exchange.optimizer_state(named)
        if held is not None:
            return held
    exchange = job.exchange
    memory = {} if exchange is None else gathered(exchange.memory(), exchange.network)
    state = strategy.optimizer_state()
    return state | {ENTRY: memory} if memory else state
