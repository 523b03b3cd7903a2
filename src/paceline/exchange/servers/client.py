"""A worker's way to its servers: the network of a node whose exchange is `parameter_server`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from paceline.errors import WorkerError
from paceline.exchange.network import Network
from paceline.exchange.seed import Seed
from paceline.exchange.servers.groups import server_group, server_groups
from paceline.exchange.servers.rendezvous import Rendezvous
from paceline.exchange.servers.sharding import cut, shard_bounds
from paceline.exchange.wire import (
    Answer,
    BadMessageError,
    Connection,
    ConnectionLostError,
    Kind,
    Request,
)
from paceline.schema import ExchangeSettings, Plan, RankContext

Vectors = Sequence[torch.Tensor]


class Served(Network):
    """Connections to all servers of this worker's group, and what they have last said.

    Nothing is ever sent from worker to worker: what workers need to know of each
    other (sums, who is still training, the wish to stop) the first server keeps.
    """

    def __init__(
        self, context: RankContext, plan: Plan, options: ExchangeSettings, *, deadline: float
    ) -> None:
        hosts = [node.host for node in plan.nodes]
        super().__init__(None, hosts, backend=context.backend, rank=context.node)
        self.options, self.deadline = options, deadline
        self.asynchronous = options.mode == "async"
        self.planned = min(plan.servers)
        """Workers of the plan; they come before the servers."""
        bound = server_group(context.node, self.planned, options)
        self.servers = server_groups(plan, options)[bound].servers
        self.version = 0
        self.stop_at = 0
        self.news = 0
        self.wishes_stop = False
        self.told = [0.0, 0.0, 0.0]
        """Losses, right answers and samples that the first server has not heard of yet."""
        self._meeting = Rendezvous(context, deadline=deadline)
        # Servers give a silent worker up after `deadline`: those who wait for it wait longer.
        self.arrival = self._meeting.announce(
            context.node, self.hosts[context.node], max(plan.servers)
        )
        self.links: list[Connection] = [
            self._meeting.link(server, self.rank, self.arrival, self.traffic, patience=2 * deadline)
            for server in self.servers
        ]
        self._busy = threading.Lock()
        self._closed = threading.Event()
        self._alive = threading.Thread(target=self._say_alive, name="paceline-alive", daemon=True)
        self._alive.start()

    def _say_alive(self) -> None:
        """A worker that evaluates or waits for data is not lost: say so from time to time."""
        while not self._closed.wait(self.deadline / 4):
            if self._busy.acquire(blocking=False):
                try:
                    for link in self.links:
                        link.ask(Request(kind=Kind.ALIVE))
                except ConnectionLostError:
                    return  # the next request says so
                finally:
                    self._busy.release()

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (ConnectionLostError, BadMessageError) as lost:
            raise WorkerError(
                f"worker {self.rank} on {self.hosts[self.rank]} lost a server"
                f" ({', '.join(self.hosts[server] for server in self.servers)}) in {what} of"
                f" {self.place}: go on from the last checkpoint with --resume ({lost})"
            ) from lost

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        with self._busy, self._explained(what):
            yield

    def _heard(self, answer: Answer) -> None:
        """Remember what the first server says in passing."""
        self.version = max(self.version, answer.version)
        self.stop_at, self.news = answer.stop, answer.news

    def _telling(self, number: int) -> dict[str, Any]:
        """What the first server is told with a request."""
        if number > 0:
            return {}
        loss_sum, correct, seen = self.told
        self.told = [0.0, 0.0, 0.0]
        return {
            "loss_sum": loss_sum,
            "correct": correct,
            "seen": seen,
            "stop": self.wishes_stop,
        }

    def hello(
        self, weights: Vectors, model: str, seeds: Sequence[Seed]
    ) -> tuple[int, torch.Tensor]:
        """The first word to all servers; the update to begin with, frozen weights and buffers.

        `seeds`: on the first worker, what each server begins with.
        """
        update, rest = 0, torch.empty(0, dtype=torch.uint8)
        with self._asking("the first words"):
            for number, (link, part) in enumerate(zip(self.links, weights, strict=True)):
                seed = seeds[number] if seeds else None
                note = {"model": model} | ({"seed": seed.note()} if seed is not None else {})
                text = json.dumps(note)
                joins = self.arrival > 0
                link.ask_with(Request(kind=Kind.HELLO, joins=joins), text)
                if seed is not None:
                    link.answered()
                    seed.send(link)
                answer = link.answered()
                length = link.json(answer.length, {"rest": int})["rest"]
                link.receive(part)
                if length:
                    rest = link.receive(torch.empty(length, dtype=torch.uint8))
                if number == 0:
                    self._heard(answer)
                    update = answer.version
        return update, rest

    def begin_push(self, request: Request, elements: int) -> None:
        """Announce a gradient to every server; nothing else may be asked until it has been sent."""
        bounds = shard_bounds(elements, len(self.links))
        self._busy.acquire()
        with self._pushing():
            for number, link in enumerate(self.links):
                start, end = bounds[number]
                link.ask(replace(request, length=end - start, **self._telling(number)))

    @contextmanager
    def _pushing(self) -> Iterator[None]:
        """Part of a push, of which there are no more when it fails."""
        try:
            with self._explained("a push"):
                yield
        except BaseException:
            self._busy.release()
            raise

    def push(self, gradient: torch.Tensor, first: int, last: int) -> None:
        """Give servers their parts of the gradient's elements from `first` to `last`."""
        with self._pushing():
            for link, (start, end) in zip(
                self.links, shard_bounds(len(gradient), len(self.links)), strict=True
            ):
                for left, right in cut([(first, last)], start, end):
                    link.send(gradient[left:right])

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count bytes but no time: a thread beside the training sends."""
        before = (self.traffic.seconds, self.traffic.waited)
        yield
        self.traffic.seconds, self.traffic.waited = before

    def end_push(self, weights: Vectors) -> None:
        """The servers' answer to the whole gradient: their weights."""
        with self._pushing():
            self._receive(weights)
        self._busy.release()

    def pull(self, weights: Vectors) -> None:
        """The newest weights of every server."""
        with self._asking("a pull"):
            for link in self.links:
                link.ask(Request(kind=Kind.PULL))
            self._receive(weights)

    def _receive(self, weights: Vectors) -> None:
        for number, (link, part) in enumerate(zip(self.links, weights, strict=True)):
            answer = link.answered()
            link.receive(part)
            if number == 0:
                self._heard(answer)

    def sum_over_workers(self, values: torch.Tensor, update: int, sequence: int) -> torch.Tensor:
        """Numbers added up over all living workers that have come to this update."""
        with self._asking("a sum"):
            link = self.links[0]
            link.ask(Request(kind=Kind.TOTAL, update=update, sequence=sequence, length=len(values)))
            link.send(values)
            self._heard(link.answered())
            return link.receive(torch.empty_like(values))

    def present(self, update: int, sequence: int) -> list[int]:
        """The workers that have come to this point of this update; all get the same list."""
        with self._asking("counting workers"):
            link = self.links[0]
            link.ask(Request(kind=Kind.PRESENT, update=update, sequence=sequence))
            answer = link.answered()
            self._heard(answer)
            found = link.receive(torch.empty(answer.length, dtype=torch.float64))
            return [int(node) for node in found.tolist()]

    def reports(self, *, fresh: bool = False) -> list[dict[str, Any]]:
        """What every server has to report; `fresh`: what was told begins anew."""
        with self._asking("a report"):
            found = []
            for number, link in enumerate(self.links):
                telling = self._telling(number)
                link.ask(Request(kind=Kind.REPORT, sequence=int(fresh), **telling))
                answer = link.answered()
                found.append(link.json(answer.length, {}))
                if number == 0:
                    self._heard(answer)
            return found

    def state(self, weights: Vectors) -> list[tuple[list[dict[str, float]], dict[str, Any]]]:
        """Every server's optimizer state: numbers by slice, vectors by name; and its weights."""
        with self._asking("reading the optimizer's state"):
            found = []
            for link, part in zip(self.links, weights, strict=True):
                link.ask(Request(kind=Kind.STATE))
                shape = {"whole": [str], "numbers": [{"*": float}]}
                note = link.json(link.answered().length, shape)
                link.receive(part)
                vectors = {name: link.receive(torch.empty_like(part)) for name in note["whole"]}
                found.append((note["numbers"], vectors))
            return found

    def done(self, *, stop: bool) -> None:
        """The last word to all servers; `stop`: the others are to end too."""
        self.wishes_stop = self.wishes_stop or stop
        with self._asking("the last words"):
            for number, link in enumerate(self.links):
                link.ask(Request(kind=Kind.DONE, **self._telling(number)))
                link.answered()

    def close(self) -> None:
        """Leave; without a last word before, servers take this worker for lost."""
        self._closed.set()
        self._alive.join()
        for link in self.links:
            link.close()
        self._meeting.close()
