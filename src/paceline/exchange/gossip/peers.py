"""The network of a node whose exchange is `hogwild`: one connection to every other node.

Of two nodes the one with the higher number asks and the other answers, each on a thread beside the
training. Whoever is lost breaks its own connections and no others (over Gloo; MPI ends the run).
The first node is also told from time to time what the others have done; it alone says who was lost.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any

import torch

from paceline.errors import PacelineError, WorkerError
from paceline.exchange.agreement import other_model, take_bytes
from paceline.exchange.base import Beginning
from paceline.exchange.gossip.copy import Mixture, Roll, part_of
from paceline.exchange.network import Network, Traffic
from paceline.exchange.seed import Seed, make_seed, read_note, receive_seed, state_of
from paceline.exchange.servers.rendezvous import Rendezvous
from paceline.exchange.servers.staleness import Staleness
from paceline.exchange.wire import (
    Answer,
    BadMessageError,
    Connection,
    ConnectionLostError,
    Kind,
    Request,
    check_finite,
    check_request,
    check_word,
)
from paceline.local.shared import divided, memory_view
from paceline.schema import ExchangeSettings, Plan, RankContext

TELL_SECONDS = 0.5
"""Between two words to each node with a lower number."""
LEAVE_SECONDS = 3.0
"""How long a node that has ended stays for those who still want to ask it."""


class Neighbours(Network):
    """All other nodes, seen from one of them."""

    def __init__(
        self, context: RankContext, plan: Plan, options: ExchangeSettings, *, deadline: float
    ) -> None:
        hosts = [node.host for node in plan.nodes]
        super().__init__(None, hosts, backend=context.backend, rank=context.node)
        self.every, self.deadline = options.mix_every, deadline
        self.shares = [node.share for node in plan.nodes]
        self.roll = Roll({n: host for n, host in enumerate(self.hosts) if n != context.node})
        """What is known of the others; complete on the first node alone."""
        self.wishes_stop = self.stops = False
        self.told = [0.0, 0.0, 0.0]
        self._failure: str | None = None
        self._leaving = False
        self._woken = threading.Event()
        self._meeting = Rendezvous(context, deadline=deadline)
        self._threads: list[threading.Thread] = []
        self._below: dict[int, Connection] = {}
        self._seed: Seed | None = None
        """On the first node: what the others begin with, until all have it."""
        self._without_seed = set(self.roll.nodes)
        self._model = ""

    def agree(self, beginning: Beginning) -> int:
        """Begin with what the first node has: the only time that anybody is waited for."""
        self._model = beginning.model
        if self.rank == 0:
            self._seed = make_seed(beginning.named, beginning.optimizer, beginning.update)
            self._seed.rest = beginning.rest_bytes()
            return beginning.update
        try:
            seed = self._ask_seed(beginning)
        except (ConnectionLostError, BadMessageError, RuntimeError) as error:
            raise WorkerError(
                f"node {self.rank} on {self.hosts[self.rank]} got no first weights from"
                f" {self.hosts[0]}: {error}"
            ) from error
        with torch.no_grad():
            for weight, part in divided(seed.weights, [weight for _, weight in beginning.named]):
                memory_view(weight.data, weight).copy_(part)
        take_bytes(beginning.rest, seed.rest)
        beginning.load_optimizer(state_of(beginning.named, seed))
        return seed.update

    def _ask_seed(self, beginning: Beginning) -> Seed:
        link = self._link(0, self.rank)
        text = json.dumps({"model": beginning.model})
        link.ask_with(Request(kind=Kind.HELLO), text)
        note = read_note(link.text(link.answered().length))
        elements = sum(weight.numel() for _, weight in beginning.named)
        pieces = sum(weight.numel() > 0 for _, weight in beginning.named)
        rest = sum(tensor.nbytes for tensor in beginning.rest)
        seed = receive_seed(link, note, elements, pieces, rest)
        self._below[0] = link
        return seed

    def _give_seed(self, node: int, link: Connection, note: dict[str, Any]) -> None:
        if note.get("model") != self._model:
            raise BadMessageError(
                f"cannot train: {other_model([self.hosts[node]], self.hosts[self.rank])}"
            )
        seed = self._seed
        if seed is None:
            raise BadMessageError("asked a second time for the first weights, or the wrong node")
        link.answer_with(Answer(), json.dumps(seed.note()))
        seed.send(link)
        self._needs_seed_no_more(node)

    def _needs_seed_no_more(self, node: int) -> None:
        with self._lock:
            self._without_seed.discard(node)
            if not self._without_seed:
                self._seed = None

    def begin(self, mixture: Mixture) -> None:
        """Start to mix; nobody is waited for any more."""
        self._mixture = mixture
        for node in range(self.rank + 1, self.size):
            self._start(lambda node=node: self._attend(node), f"answer-{node}")
        # One that never comes, or has ended already, must not keep this one from the others.
        for node in range(1, self.rank):
            self._start(lambda node=node: self._connect(node), f"connect-{node}")
        if self.rank > 0:
            self._start(self._go_round, "mix")

    def _start(self, work: Any, name: str) -> None:
        thread = threading.Thread(target=work, name=f"paceline-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _link(self, low: int, high: int) -> Connection:
        return self._meeting.link(low, high, 0, Traffic(), patience=self.deadline)

    def _fold(self, link: Connection) -> None:
        """Count what a link has moved; training has not waited for it."""
        taken = link.traffic.take()
        taken.waited = 0.0
        with self._lock:
            self.traffic.add(taken)

    # --- asking -----------------------------------------------------------------

    def _connect(self, node: int) -> None:
        try:
            link = self._link(node, self.rank)
        except (RuntimeError, PacelineError):
            self._lose(node)
            return
        with self._lock:
            self._below[node] = link
        self._woken.set()

    def _reached(self) -> list[int]:
        """Nodes before this one that are connected and still train."""
        with self._lock:
            return sorted(self._below)

    def _go_round(self) -> None:
        """Mix with the nodes before this one, in turns; tell them from time to time."""
        mixed_at, told_at, turn = self._mixture.clock, 0.0, 0
        with torch.no_grad():
            while not self._leaving:
                self._woken.clear()
                now, nodes = time.monotonic(), self._reached()
                if nodes and self._mixture.clock - mixed_at >= self.every:
                    mixed_at = self._mixture.clock
                    turn += 1
                    self._ask(nodes[(turn + self.rank) % len(nodes)], Kind.MIX)
                elif now - told_at >= TELL_SECONDS:
                    told_at = now
                    for node in nodes:
                        self._ask(node, Kind.REPORT)
                else:
                    self._woken.wait(TELL_SECONDS / 5)

    def _ask(self, node: int, kind: Kind) -> None:
        link = self._below[node]
        word = self._word() if node == 0 else None
        text = json.dumps(word) if word is not None else ""
        try:
            wanted = kind is Kind.MIX or (kind is Kind.DONE and node == 0)
            sent, clock = self._mixture.copy() if wanted else (None, 0)
            link.ask(Request(kind=kind, update=self._mixture.clock, length=len(text)))
            if text:
                link.send_text(text)
            if sent is not None:
                link.send(sent)
            answer = link.answered()
            if kind is Kind.MIX and sent is not None:
                other = link.receive(torch.empty_like(sent))
                check_finite(other, "weights")
                part = part_of(self.shares[self.rank], self.shares[node])
                self._mixture.meet(sent, clock, other, part)
            self.stops = self.stops or bool(answer.stop)
            if answer.length:  # it has ended its training
                self._forget(node)
        except WorkerError as refused:  # by the other: this copy is no longer what it should be
            self._failure = str(refused)
        except BadMessageError as bad:
            self.roll.lose(node, str(bad), self._mixture.clock)
            self._lose(node)
        except ConnectionLostError:
            self._lose(node)
        finally:
            self._fold(link)

    def _word(self) -> dict[str, Any]:
        """What the first node is told; what was told before is not told again."""
        with self._lock:
            told, self.told = self.told, [0.0, 0.0, 0.0]
        return {
            "clock": self._mixture.clock,
            "staleness": self._mixture.staleness.encoded(),
            "told": told,
            "stop": self.wishes_stop,
        }

    def _forget(self, node: int) -> None:
        with self._lock:
            self._below.pop(node, None)

    def _lose(self, node: int) -> None:
        self._forget(node)
        # After a refusal the other is gone too: the refusal is what went wrong.
        if node == 0 and not self._leaving and not self._failure:
            self._failure = (
                f"node {self.rank} on {self.hosts[self.rank]} lost the first node,"
                f" {self.hosts[0]}, which writes the checkpoints: go on from the last one with"
                " --resume"
            )

    # --- answering --------------------------------------------------------------

    def _attend(self, node: int) -> None:
        """Answer a node with a higher number until it is done or lost."""
        try:
            link = self._link(self.rank, node)
        except (RuntimeError, PacelineError):
            self.roll.lose(node, "did not come", self._mixture.clock)
            self._needs_seed_no_more(node)
            return
        try:
            with torch.no_grad():
                while not self._answer(node, link):
                    self._fold(link)
        except (ConnectionLostError, WorkerError):
            self.roll.lose(node, "was lost", self._mixture.clock)
        except BadMessageError as bad:
            self.roll.lose(node, str(bad), self._mixture.clock)
            who = f"node {node} on {self.hosts[node]}"
            link.refuse(bad.sentence(who, self.hosts[self.rank]))
        finally:
            self._needs_seed_no_more(node)
            link.close()

    def _answer(self, node: int, link: Connection) -> bool:
        """One request; True after the last one."""
        request = link.asked()
        check_request(request, self._mixture.elements)
        link.traffic.seconds = 0.0  # nothing was under way until it came
        note = read_note(link.text(request.length)) if request.length else {}
        if request.kind == Kind.HELLO:
            self._give_seed(node, link, note)
            return False
        if note:
            self._heard(node, note)
        # Asked once: who is not told that this was the last answer would wait for another.
        leaving = self._leaving
        answer = Answer(
            version=self._mixture.clock,
            stop=int(self.stops or self.wishes_stop),
            length=int(leaving),
        )
        if request.kind == Kind.MIX:
            other = link.receive(torch.empty(self._mixture.elements))
            check_finite(other, "weights")
            part = part_of(self.shares[self.rank], self.shares[node])
            mine, _ = self._mixture.answer(other, part)
            link.answer(answer)
            link.send(mine)
        elif request.kind == Kind.DONE:
            last = None
            if self.rank == 0:  # it keeps what all come to
                last = link.receive(torch.empty(self._mixture.elements))
                check_finite(last, "weights")
            self.roll.finish(node, last, self.shares[node])
            link.answer(replace(answer, length=0))
            return True
        else:
            link.answer(answer)
        return leaving

    def _heard(self, node: int, word: dict[str, Any]) -> None:
        check_word(word, ("clock",))
        self.roll.hear(node, word)
        if word["stop"]:
            self.stops = True

    # --- what the thread that trains calls ----------------------------------------

    def updated(self) -> None:
        """After an update: there may be something to mix. Raises when the run cannot go on."""
        self._woken.set()
        if self._failure is not None:
            raise WorkerError(self._failure)

    def note(self, loss_sum: float, correct: float, samples: float) -> None:
        """What an update gave; the first node hears of it with the next word."""
        with self._lock:
            told = (loss_sum, correct, samples)
            self.told = [a + b for a, b in zip(self.told, told, strict=True)]

    @property
    def staleness(self) -> Staleness:
        """Of the mixes that this node has asked for."""
        return self._mixture.staleness

    def lose(self, node: int) -> None:
        """On the first node: others know that a node was lost, before its connection shows it."""
        self.roll.lose(node, "was lost", self._mixture.clock)

    def mean_of_all(self, mixture: Mixture) -> torch.Tensor | None:
        """When all others have ended: the mean of their copies and this one, once; else None."""
        if self.roll.training:
            return None
        own, _ = mixture.copy()
        return self.roll.mean_with(own, self.shares[self.rank])

    def leave(self) -> None:
        """The last words: the first node gets this copy, and stays until all have come."""
        if self.rank == 0:
            self.stops = True
            return
        # The first node stays until it has heard the last word of all.
        end = time.monotonic() + self.deadline
        while 0 not in self._reached() and self._failure is None and time.monotonic() < end:
            time.sleep(TELL_SECONDS / 10)
        self._leaving = True
        self._woken.set()
        self._threads[-1].join(self.deadline)
        with torch.no_grad():
            for node in self._reached():
                self._ask(node, Kind.DONE)

    def close(self) -> None:
        self._leaving = True
        self._woken.set()
        end = time.monotonic() + LEAVE_SECONDS
        for thread in self._threads:
            thread.join(max(0.1, end - time.monotonic()))
        for node in self._reached():
            self._below[node].close()
        self._meeting.close()
