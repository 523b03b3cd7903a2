"""What a server answers: pushes, pulls, sums, reports. One lock around all of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.exchange.agreement import other_model
from paceline.exchange.network import Traffic
from paceline.exchange.seed import Seed, read_note, receive_seed
from paceline.exchange.servers.copies import Words, take_copy
from paceline.exchange.servers.groups import ServerGroup
from paceline.exchange.servers.members import Member, Round, must_wait
from paceline.exchange.servers.service_time import Duty
from paceline.exchange.servers.shard import Shard
from paceline.exchange.servers.staleness import Staleness, rate_correction
from paceline.exchange.wire import Answer, BadMessageError, Connection, Kind, Request, check_push
from paceline.schema import ExchangeSettings

KEPT_SUMS = 64


class EndedError(Exception):
    """The run has failed: whoever waits is told so."""


@dataclass(frozen=True, kw_only=True)
class ServerPlace:
    """A server among servers and workers."""

    node: int
    groups: Sequence[ServerGroup]
    """All server groups of the run."""
    hosts: Sequence[str]
    """Of all nodes."""

    @property
    def group(self) -> ServerGroup:
        """The server group that this server belongs to."""
        return next(group for group in self.groups if self.node in group.servers)

    @property
    def number(self) -> int:
        """Among its group's servers; the first also keeps sums, tallies and the wish to stop."""
        return self.group.servers.index(self.node)

    @property
    def workers(self) -> int:
        """Planned workers of all groups."""
        return sum(len(group.workers) for group in self.groups)


class RequestHandler:
    """What the threads of one server share, and how each request is answered."""

    def __init__(
        self,
        shard: Shard,
        place: ServerPlace,
        options: ExchangeSettings,
        *,
        patience: float,
        model: str = "",
        rest_bytes: int = 0,
        duty: Duty | None = None,
    ) -> None:
        """`model` and `rest_bytes`: what workers must have built too, see `model_digest`."""
        self.shard, self.place, self.options = shard, place, options
        self.synchronous = options.mode == "sync"
        self.version = self.start = 0
        self.model, self.rest_bytes = model, rest_bytes
        self.seeded = False
        """The first worker has said what training begins with."""
        self.rest = torch.empty(0, dtype=torch.uint8)
        """The first worker's frozen weights and buffers."""
        self.patience = patience
        self.duty = duty or Duty()
        self.members = {
            node: Member(node, host, group) for node, host, group in place.group.workers
        }
        others = []
        if place.group.number == 0:
            others = [group.servers[place.number] for group in place.groups[1:]]
        self.copies = {node: Member(node, place.hosts[node], -1) for node in others}
        """Servers of other groups that hold the same shard, where this is the first group's."""
        self.words = Words(others)
        self.rounds: dict[int, Round] = {}
        self.staleness = Staleness()
        self.news: list[str] = []
        self.failure: str | None = None
        self._turn = threading.Condition()
        self._threads: list[tuple[Member, threading.Thread]] = []
        self._sums: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        self._told = [0.0, 0.0, 0.0]
        self._news_told = 0
        self._stop_wished = False
        self._stop_at = 0
        self._traffic: list[Traffic] = []

    # --- requests -----------------------------------------------------------------

    def _handle(self, member: Member, link: Connection, request: Request) -> None:
        kind = Kind(request.kind)
        if kind is Kind.ALIVE:
            return
        if kind is Kind.SEED:
            self._send_seed(link)
        elif kind is Kind.HELLO:
            self._hello(member, link, request)
        elif kind is Kind.PUSH:
            self._push(member, link, request)
        elif kind is Kind.PULL:
            self._answer_weights(member, link)
        elif kind is Kind.TOTAL:
            values = link.receive(torch.empty(request.length, dtype=torch.float64))
            total = self._total(member, request, values)
            link.answer(self._answer())
            link.send(total)
        elif kind is Kind.PRESENT:
            there = sorted(self._gathered(member, request, torch.empty(0)))
            link.answer(self._answer(length=len(there)))
            link.send(torch.tensor(there, dtype=torch.float64))
        elif kind is Kind.REPORT:
            text = json.dumps(self._report(member, request))
            link.answer_with(self._answer(), text)
        elif kind is Kind.STATE:
            self._send_state(link)
        elif kind is Kind.MIX:
            take_copy(
                link,
                request,
                lambda text: self._hear_word(member, text),
                self._changed,
                self.shard.weights,
            )
        elif kind is Kind.DONE:
            self._done(member, request)
            link.answer(self._answer())

    def _answer(self, *, version: int | None = None, length: int = 0) -> Answer:
        return Answer(
            version=self.version if version is None else version,
            stop=self._stop_at,
            news=len(self.news),
            length=length,
        )

    def _answer_weights(self, member: Member, link: Connection) -> None:
        with self._turn:
            copy = self.shard.copy()  # the next update may come while it is sent
            member.pulled = self.version
            answer = self._answer()
        with self.duty.moving():
            link.answer(answer)
            link.send(copy)

    def _hello(self, member: Member, link: Connection, request: Request) -> None:
        note = read_note(link.text(request.length))
        if note.get("model") != self.model:
            server = self.place.hosts[self.place.node]
            raise BadMessageError(f"cannot train: {other_model([member.host], server)}")
        if member.node == 0 and not request.joins:
            link.answer(self._answer())  # now the tensors are sent, whose sizes are known to agree
            sizes = len(self.shard.weights), len(self.shard.slices), self.rest_bytes
            self.plant(receive_seed(link, note.get("seed", {}), *sizes))
        start = self._begin(member, request)
        with self._turn:
            copy = self.shard.copy()
            member.pulled = self.version
            answer = self._answer(version=start)
        link.answer_with(answer, json.dumps({"rest": len(self.rest)}))
        link.send(copy)
        if len(self.rest):
            link.send(self.rest)

    def plant(self, seed: Seed) -> None:
        """Begin with what the first worker has, once."""
        with self._turn:
            if self.seeded:
                raise BadMessageError("sent first weights to a training that was under way")
            self.shard.take(seed)
            self.rest = seed.rest
            self.version = self.start = seed.update
            for member in self.members.values():
                member.clock = member.pulled = seed.update
                member.joined_at = seed.update - 1
            self.seeded = True
            self._turn.notify_all()

    def _begin(self, member: Member, request: Request) -> int:
        """The update with which a worker begins, when the first one has said where that is."""
        with self._turn:
            while not self.seeded:
                self._wait()
            start = self.start
            if request.joins:
                before = self.members.get(member.node)
                if before is not None and before.active:
                    raise EndedError(f"{before.name} is still training")
                if self.place.number == 0 and self.synchronous:
                    start = self.version
                elif self.place.number == 0:
                    clocks = [other.clock for other in self.members.values() if other.active]
                    start = min(clocks, default=self.version)
                member.clock = member.joined_at = start
                member.expected = True
                self.members[member.node] = member
                for round_ in self.rounds.values():  # what its forerunner pushed went with it
                    round_.received.pop(member.node, None)
                count = sum(other.active for other in self.members.values())
                self.news.append(
                    f"{member.name} joined at update {self.version}; going on with {count} workers"
                )
            return start

    def _send_seed(self, link: Connection) -> None:
        """To a server that holds a copy of this shard: what training begins with there."""
        with self._turn:
            while not self.seeded:
                self._wait()
            seed = self.shard.seed(self.start)
            seed.rest = self.rest
        link.answer_with(self._answer(), json.dumps(seed.note()))
        seed.send(link)

    def _push(self, member: Member, link: Connection, request: Request) -> None:
        if member.gradient is None:
            member.gradient = torch.empty_like(self.shard.weights)
        with self.duty.moving():
            for first, last in self.shard.pieces:
                link.receive(member.gradient[first:last])
        check_push(request, member.gradient)
        with self._turn:
            self._tell(request)
            if not (self.synchronous and request.update < self.version):  # not overtaken
                round_ = self.rounds.setdefault(member.group, Round())
                round_.received[member.node] = request
                self._advance(member.group)
                while not round_.applied:
                    self._wait()
            member.clock = request.update + 1
            self._turn.notify_all()
            while not self.synchronous and must_wait(
                member, self.members.values(), self.options.max_staleness
            ):
                self._wait()
        self._answer_weights(member, link)

    def _wait(self) -> None:
        self._turn.wait(0.5)
        if self.failure is not None:
            raise EndedError

    def _advance(self, group: int) -> None:
        """Apply what a group has pushed, if that is all."""
        round_ = self.rounds.get(group)
        backup = self.options.backup if self.synchronous else 0
        members = [member for member in self.members.values() if member.group == group]
        if round_ is None or not round_.is_complete(members, backup):
            return
        started = time.perf_counter()
        # By number and not as they came: the same sum in every run.
        nodes = sorted(round_.received)
        gradient = self.members[nodes[0]].gradient
        for node in nodes[1:]:
            gradient.add_(self.members[node].gradient)
        requests = [round_.received[node] for node in nodes]
        samples, total = sum(request.samples for request in requests), requests[0].total
        if self.synchronous and samples and samples != total:
            gradient.mul_(total / samples)  # the mean over those that came
        staleness = self.version - min(self.members[node].pulled for node in nodes)
        self.staleness.add(staleness)
        rate = requests[0].rate
        if self.options.correct_staleness and not self.synchronous:
            rate *= rate_correction(staleness)
        self.shard.apply(gradient, rate)
        self.duty.applied(self.version, started, self._traffic)
        self.version += 1
        if self._stop_wished and not self._stop_at:
            self._stop_at = self.version if self.synchronous else 1
        round_.applied = True
        del self.rounds[group]
        self._turn.notify_all()

    def _total(self, member: Member, request: Request, values: torch.Tensor) -> torch.Tensor:
        """Numbers added up over all members of an update."""
        parts = self._gathered(member, request, values)
        # A worker beyond the plan counts itself among the nodes: its vectors may be longer.
        result = torch.zeros(max(len(part) for part in parts.values()), dtype=torch.float64)
        for node in sorted(parts):
            result[: len(parts[node])] += parts[node]
        return result[: len(values)]

    def _gathered(
        self, member: Member, request: Request, values: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """What every member of an update gave; the same for all of them, whoever is lost later."""
        key = (request.update, request.sequence)
        with self._turn:
            parts = self._sums.setdefault(key, {})
            parts[member.node] = values
            self._turn.notify_all()
            while any(
                other.active and other.joined_at < request.update and other.node not in parts
                for other in self.members.values()
            ):
                self._wait()
            while len(self._sums) > KEPT_SUMS:
                self._sums.pop(next(iter(self._sums)))
            return dict(parts)

    def _tell(self, request: Request) -> None:
        told = (request.loss_sum, request.correct, request.seen)
        self._told = [a + b for a, b in zip(self._told, told, strict=True)]
        if request.stop:
            self._stop_wished = True
            if not self.synchronous:
                self._stop_at = 1

    def _report(self, member: Member, request: Request) -> dict[str, object]:
        with self._turn:
            self._tell(request)
            told = self._told
            if request.sequence:
                self._told = [0.0, 0.0, 0.0]
            others = [other for other in self.members.values() if other is not member]
            report = {
                "updates": self.version,
                "staleness": self.staleness.encoded(),
                "bytes_sent": sum(traffic.bytes_sent for traffic in self._traffic),
                "bytes_received": sum(traffic.bytes_received for traffic in self._traffic),
                "news": self.news,
                "told": told,
                "training": sum(other.active for other in others),
                "progress": sum(other.clock for other in others),
                "mixes": 0,
            }
            return self.words.added_to(report)

    def _send_state(self, link: Connection) -> None:
        with self._turn:
            whole, numbers = self.shard.entries()
            vectors = [self.shard.entry(name) for name in whole]
            weights = self.shard.copy()
        link.answer_with(self._answer(), json.dumps({"whole": whole, "numbers": numbers}))
        for vector in (weights, *vectors):
            link.send(vector)

    def _done(self, member: Member, request: Request) -> None:
        with self._turn:
            self._tell(request)
            member.done = True
            self.words.finish(member.node)
            for group in list(self.rounds):
                self._advance(group)
            self._turn.notify_all()

    def _hear_word(self, member: Member, text: str) -> Answer:
        with self._turn:
            word = self.words.hear(member.node, text)
            self.news += word.news
            self._told = [a + b for a, b in zip(self._told, word.told, strict=True)]
            if word.stop:
                self._stop_wished, self._stop_at = True, 1
            return self._answer()

    def _changed(self, change: torch.Tensor) -> torch.Tensor:
        with self._turn:
            self.shard.add(change)
            return self.shard.copy()
