"""A server of `parameter_server`: one thread per worker, one lock around the shard.

Workers belong to groups. A group's gradients are added up and applied as one update
when all of it (or all but `backup`) have pushed: one group of all workers is
synchronous training, one group per worker is Downpour. With several server groups
this is one server of one of them: see `copies.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from paceline.errors import PacelineError, WorkerError
from paceline.exchange.network import Traffic
from paceline.exchange.seed import read_note, receive_seed
from paceline.exchange.servers.copies import Copy, Word
from paceline.exchange.servers.groups import group_of, server_group
from paceline.exchange.servers.members import Member
from paceline.exchange.servers.rendezvous import Arrival, Rendezvous
from paceline.exchange.servers.request_handler import EndedError, RequestHandler
from paceline.exchange.wire import (
    BadMessageError,
    Connection,
    ConnectionLostError,
    Kind,
    Request,
    check_request,
)

LOOK_SECONDS = 0.2
"""Between two looks for workers that want to join."""


class ShardServer(RequestHandler):
    """A server from its start to the end of its last worker."""

    def run(self, meeting: Rendezvous, tick: Callable[[int], Iterable[int]]) -> None:
        """Serve until every worker is done.

        `tick` is told the updates from time to time, and says who was lost as others know.
        """
        for member in (*self.members.values(), *self.copies.values()):
            self._attend(meeting, member, 0)
        copy = self._copy(meeting)
        arrivals = 0
        looking = meeting.takes_arrivals
        while self.failure is None and self._is_needed:
            with self._turn:
                self._turn.wait(LOOK_SECONDS)
            for node in tick(self.version):
                if node in self.members:
                    self.lose(self.members[node], "was lost")
            self._mix(copy)
            try:
                while looking and (arrival := meeting.arrival(arrivals + 1)) is not None:
                    arrivals += 1
                    self._welcome(meeting, arrival)
            except RuntimeError:
                looking = False  # the first node, which keeps the store, has left
        self._mix(copy, last=True)
        for member, thread in self._threads:
            # Who was lost without a word may keep its connection open, and its thread waiting.
            thread.join(LOOK_SECONDS if member.lost else self.patience)
        if self.failure is not None:
            raise WorkerError(self.failure)

    @property
    def _is_needed(self) -> bool:
        return any(member.active for member in (*self.members.values(), *self.copies.values()))

    def _welcome(self, meeting: Rendezvous, arrival: Arrival) -> None:
        """Attend to a worker that came later, if it belongs to this server's group."""
        workers = self.place.workers
        if server_group(arrival.node, workers, self.options) != self.place.group.number:
            return
        known = self.members.get(arrival.node)
        planned = group_of(arrival.node, workers, self.options.mode, self.options.groups)
        group = known.group if known else planned
        newcomer = Member(arrival.node, arrival.host, group, expected=False)
        self._attend(meeting, newcomer, arrival.number)

    def _attend(self, meeting: Rendezvous, member: Member, arrival: int) -> None:
        traffic = Traffic()
        self._traffic.append(traffic)

        def attend() -> None:
            try:
                link = meeting.link(
                    self.place.node, member.node, arrival, traffic, patience=self.patience
                )
            except (RuntimeError, PacelineError):
                self.lose(member, "did not come")
                return
            with torch.no_grad():
                self._serve(member, link)

        thread = threading.Thread(target=attend, name=f"paceline-serve-{member.node}", daemon=True)
        self._threads.append((member, thread))
        thread.start()

    def _serve(self, member: Member, link: Connection) -> None:
        try:
            while not member.done:
                request = link.asked()
                check_request(request, len(self.shard.weights))
                if self.failure is not None and request.kind != Kind.ALIVE:
                    raise EndedError
                if member.lost:  # it was silent for too long, and comes back
                    raise EndedError(f"{member.name} was given up: the others went on without it")
                self._handle(member, link, request)
        except ConnectionLostError:
            self.lose(member, "was lost")
        except BadMessageError as bad:
            self.lose(member, str(bad))
            link.refuse(bad.sentence(member.name, self.place.hosts[self.place.node]))
        except EndedError as ended:
            link.refuse(str(ended) or self.failure or "the run has ended")
        except Exception as error:
            with self._turn:
                self.failure = f"server {self.place.number} failed: {error!r}"
                self._turn.notify_all()
            link.refuse(self.failure)
        finally:
            link.close()

    def lose(self, member: Member, how: str) -> None:
        """Go on without a member; without the first one nobody would write what all share."""
        with self._turn:
            if member.done or member.lost or not member.expected:
                return
            member.lost = True
            left = sum(other.active for other in self.members.values())
            text = f"{member.name} {how} at update {self.version}"
            if member.node == 0:
                self.failure = (
                    f"{text}, and it writes the checkpoints: go on from the last one with --resume"
                )
            elif member.node in self.copies:
                self.failure = (
                    f"the server {member.host} {how} at update {self.version}: go on from the last"
                    " checkpoint with --resume"
                )
            elif left == 0 and self.place.group.number == 0:
                self.failure = f"{text}, and no worker is left: go on with --resume"
            else:
                self.news.append(f"{text}; going on with {left} worker{'s' * (left > 1)}")
            for group in list(self.rounds):
                self._advance(group)
            self._turn.notify_all()

    # --- other copies of the weights ------------------------------------------------

    def _copy(self, meeting: Rendezvous) -> Copy | None:
        """This server's way to the first group, if it belongs to another one."""
        if self.place.group.number == 0:
            return None
        traffic = Traffic()
        self._traffic.append(traffic)
        first = self.place.groups[0].servers[self.place.number]
        try:
            link = meeting.link(first, self.place.node, 0, traffic, patience=2 * self.patience)
            link.ask(Request(kind=Kind.SEED))
            note = read_note(link.text(link.answered().length))
            sizes = len(self.shard.weights), len(self.shard.slices), self.rest_bytes
            seed = receive_seed(link, note, *sizes)
        except (ConnectionLostError, BadMessageError, RuntimeError, PacelineError) as error:
            with self._turn:
                self.failure = (
                    f"{self.place.hosts[self.place.node]} got no first weights from the server"
                    f" {self.place.hosts[first]}: {error}"
                )
                self._turn.notify_all()
            return None
        self.plant(seed)
        return Copy(self, link, every=self.options.mix_every, base=seed.weights)

    def _mix(self, copy: Copy | None, *, last: bool = False) -> None:
        if copy is None or self.failure is not None:
            return
        try:
            with torch.no_grad():
                copy.turn(self.version - self.start, last=last)
            if last:
                copy.close()
        except (ConnectionLostError, BadMessageError, WorkerError) as error:
            with self._turn:
                self.failure = (
                    f"{self.place.hosts[self.place.node]} lost the first server group at update"
                    f" {self.version}: go on from the last checkpoint with --resume ({error})"
                )
                self._turn.notify_all()

    def tell_word(self) -> Word:
        """What the first group hears of this one; what is new is told once."""
        with self._turn:
            told, self._told = self._told, [0.0, 0.0, 0.0]
            news, self._news_told = self.news[self._news_told :], len(self.news)
            return Word(
                training=max(1, sum(member.active for member in self.members.values())),
                progress=sum(member.clock for member in self.members.values()),
                updates=self.version - self.start,
                staleness=self.staleness.encoded(),
                bytes_sent=sum(traffic.bytes_sent for traffic in self._traffic),
                bytes_received=sum(traffic.bytes_received for traffic in self._traffic),
                news=news,
                told=told,
                stop=self._stop_wished,
            )

    def copy_of_weights(self) -> torch.Tensor:
        with self._turn:
            return self.shard.copy()

    def add_to_weights(self, change: torch.Tensor) -> None:
        """What other groups have done to the weights."""
        with self._turn:
            self.shard.add(change)

    def hear_stop(self, stop: int) -> None:
        """The first group says that all stop."""
        if stop:
            with self._turn:
                self._stop_wished, self._stop_at = True, 1
