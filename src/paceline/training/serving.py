"""Trainings with parameter servers: what a server runs, and what its workers' loop sees."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.errors import UnsupportedError
from paceline.exchange.agreement import rest_of
from paceline.exchange.gossip.peers import Neighbours
from paceline.exchange.losses import Losses
from paceline.exchange.servers.client import Served
from paceline.exchange.servers.groups import check_groups, server_groups
from paceline.exchange.servers.rendezvous import Rendezvous
from paceline.exchange.servers.request_handler import ServerPlace
from paceline.exchange.servers.server import ShardServer
from paceline.exchange.servers.service_time import Duty
from paceline.exchange.servers.shard import Shard
from paceline.exchange.servers.staleness import Staleness
from paceline.local.shared import divided, model_digest
from paceline.schema import Config, Plan, write_json
from paceline.signals import StopSignals
from paceline.training.assemble import Task
from paceline.training.mixing import MixedTeam, wait_for_others
from paceline.training.optimizers import is_elementwise
from paceline.training.parts import make_parts
from paceline.training.team import Team
from paceline.training.watching import recording

if TYPE_CHECKING:
    from paceline.observe.recorder import Recorder


def check_served(config: Config, plan: Plan) -> None:
    """Refuse what servers cannot do; said on every node, so that none waits for another."""
    if not is_elementwise(config.optimizer):
        raise UnsupportedError(
            "an optimizer of one's own cannot be cut into the shards of servers: use sgd, adam or"
            " adamw, or exchange.kind = 'allreduce'"
        )
    check_groups(plan, config.exchange)
    shards = len(plan.servers) // config.exchange.server_groups
    if config.optimizer.clip_norm is not None and shards > 1:
        raise UnsupportedError(
            f"optimizer.clip_norm needs the whole gradient in one place, but {shards} servers share"
            " it: use one server (for each server group), or 'allreduce'"
        )


def serve(task: Task) -> int:
    """Hold a shard of the weights until every worker is done; the exit code."""
    with recording(task, role="server") as recorder:
        return _serve(task, recorder)


def _serve(task: Task, recorder: Recorder) -> int:
    config, plan, context = task.config, task.plan, task.context
    check_served(config, plan)
    place = ServerPlace(
        node=context.node,
        groups=server_groups(plan, config.exchange),
        hosts=[node.host for node in plan.nodes],
    )
    shard, model, rest_bytes = _make_shard(task, place)
    duty = Duty(recorder)
    server = ShardServer(
        shard,
        place,
        config.exchange,
        patience=config.train.deadline,
        model=model,
        rest_bytes=rest_bytes,
        duty=duty,
    )
    losses = Losses(task.run.path, context.node)

    def tick(update: int) -> list[int]:
        _enter(task, update)
        return losses.fresh()

    meeting = Rendezvous(context, deadline=config.train.deadline)
    try:
        with StopSignals(_go_on_serving).installed():
            recorder.ready()
            server.run(meeting, tick)
    finally:
        duty.close()
        meeting.close()
    return 0


def _make_shard(task: Task, place: ServerPlace) -> tuple[Shard, str, int]:
    """What this server holds, what its model is, and how many bytes that has besides.

    What the weights are, the first worker says: see `exchange.seed`.
    """
    config, plan = task.config, task.plan
    parts = make_parts(config, task.given)
    try:
        torch.set_num_threads(max(1, plan.nodes[place.node].threads))
        model = parts.build_model()
        if plan.memory_format == "channels_last":
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        shard = Shard(
            [(name, p) for name, p in model.named_parameters() if p.requires_grad],
            parts.build_optimizer,
            number=place.number,
            servers=len(place.group.servers),
            clip_norm=config.optimizer.clip_norm,
            bucket_bytes=int((plan.bucket_mb or config.exchange.bucket_mb) * 2**20),
        )
        return shard, model_digest(model), sum(tensor.nbytes for tensor in rest_of(model))
    finally:
        parts.dataset.close()


def _go_on_serving() -> None:
    """A first signal reaches all processes: workers stop in order, and need their servers."""


def _enter(task: Task, update: int) -> None:
    if task.board is not None:
        task.board.enter("serving", update)


def make_team(task: Task) -> Team:
    """The team of a rank: with parameter servers, workers know each other only through them."""
    if isinstance(task.network, Served):
        return ServedTeam(task, task.network)
    if isinstance(task.network, Neighbours):
        return MixedTeam(task, task.network)
    return Team(task.context, task.board, task.network)


class ServedTeam(Team):
    """Workers that talk to servers and never to each other.

    Synchronous: sums over the living workers, kept by the first server. Asynchronous: nobody
    waits for anybody; the first worker evaluates and writes, from what servers tell it.
    """

    is_steady = adds_up = False

    def __init__(self, task: Task, served: Served) -> None:
        super().__init__(task.context, task.board, served)
        self.served, self.run = served, task.run
        self._done = self._sequence = self._news = 0
        self._bytes = [0, 0]

    def enter(self, phase: str, update: int) -> None:
        super().enter(phase, update)
        done = update + 1 if phase in ("update", "left out") else update
        if done != self._done:
            self._done, self._sequence = done, 0

    def sum(self, values: Sequence[float], name: str) -> list[float]:
        if not self.served.asynchronous:
            self._sequence += 1
            total = self.served.sum_over_workers(
                torch.tensor(list(values), dtype=torch.float64), self._done, self._sequence
            )
            return [float(value) for value in total]
        if name != "epoch":
            return list(values)
        told = self.served.reports(fresh=True)[0]["told"] if self.is_first else list(values)
        return [told[0], told[1], max(1.0, told[2])]

    def share_buffers(self, model: nn.Module) -> None:
        buffers = list(model.buffers())
        if self.served.asynchronous or not buffers:
            return
        flat = torch.cat([buffer.double().reshape(-1) for buffer in buffers])
        flat = torch.tensor(self.sum((flat if self.is_first else flat * 0).tolist(), "buffers"))
        for buffer, part in divided(flat, buffers):
            buffer.copy_(part.reshape(buffer.shape))

    def should_stop(self, updates_done: int) -> bool:
        self.served.wishes_stop = self._requested
        if self.served.asynchronous and self._requested:
            return True
        return 0 < self.served.stop_at <= updates_done

    def request_stop(self) -> None:
        self._requested = True

    @property
    def evaluates(self) -> bool:
        return self.is_first or not self.served.asynchronous

    def evaluation_shares(self, shares: list[float]) -> list[float]:
        if not self.served.asynchronous:
            return self._shares_of_those_present(shares)
        return [float(rank == self.context.rank) for rank in range(len(shares))]

    def _shares_of_those_present(self, shares: list[float]) -> list[float]:
        """The whole test set, divided among the workers that are there now; a node is a rank."""
        self._sequence += 1
        there = self.served.present(self._done, self._sequence)
        planned = shares[: self.served.planned]
        usual = sum(planned) / len(planned)
        mine = [planned[node] if node < len(planned) else usual for node in there]
        # All take the first worker's numbers: who joined may have a plan of its own.
        agreed = self.sum(mine if self.is_first else [0.0] * len(there), "shares")
        if not any(agreed):
            agreed = [1.0] * len(there)
        found = dict(zip(there, agreed, strict=True))
        return [found.get(node, 0.0) for node in range(max(there) + 1)]

    def is_behind(self, update: int) -> bool:
        return not self.served.asynchronous and self.served.version > update

    def note(self, loss_sum: float, correct: float, samples: int) -> None:
        told = (loss_sum, correct, samples)
        self.served.told = [a + b for a, b in zip(self.served.told, told, strict=True)]

    def news(self) -> list[str]:
        if not self.is_first or self.served.news <= self._news:
            return []
        lines = self.served.reports()[0]["news"]
        fresh, self._news = lines[self._news :], len(lines)
        return [str(line) for line in fresh]

    def wait_for_all(self) -> float:
        if not self.served.asynchronous or not self.is_first:
            return 0.0

        def look() -> tuple[int, int]:
            report = self.served.reports()[0]
            return report["training"], report["progress"]

        return wait_for_others(look, self.served.deadline, "worker")

    def epoch_line(self) -> dict[str, Any]:
        """Staleness and the servers' traffic, on the first worker."""
        if not self.is_first:
            return {}
        reports = self.served.reports()
        staleness = Staleness()
        for report in reports:
            staleness.merge(report["staleness"])
        found = {
            "mean": staleness.mean,
            "largest": staleness.largest,
            "updates": staleness.updates,
            "histogram": staleness.encoded(),
            "workers": reports[0]["news"],
            "mixes": sum(report["mixes"] for report in reports),
        }
        with contextlib.suppress(OSError):
            write_json(self.run.path / "staleness.json", found)
        sent = sum(report["bytes_sent"] for report in reports)
        received = sum(report["bytes_received"] for report in reports)
        before, self._bytes = self._bytes, [sent, received]
        return {
            "staleness_mean": staleness.mean,
            "staleness_largest": staleness.largest,
            "server_updates": reports[0]["updates"],
            "server_bytes_sent": sent - before[0],
            "server_bytes_received": received - before[1],
        }

    def close(self) -> None:
        self.served.done(stop=self.is_first and self.served.asynchronous)
