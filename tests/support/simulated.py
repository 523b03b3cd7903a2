"""A small discrete-event simulation of what formulas cannot say.

Queues at parameter servers and how stale gradients get, and nodes that are slow by chance. Times
are numbers, not clocks: thousands of nodes take seconds. Random numbers come from a seed, so a
result repeats.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerTask:
    """Workers and dedicated servers, each on a full-duplex link of its own."""

    compute: tuple[float, ...]
    """Seconds per update of each worker."""
    size: float
    """Bytes of all weights."""
    bandwidth: float
    latency: float = 0.0
    servers: int = 1
    asynchronous: bool = False
    sharing: Literal["fair", "fifo"] = "fair"
    """How messages share a server's link: at once, or one after the other."""
    deviation: float = 0.0
    """Standard deviation of computing, in parts of its time."""
    updates: int = 20
    """Per worker."""
    seed: int = 0


@dataclass(frozen=True)
class ServerRun:
    """What simulated parameter servers gave."""

    seconds: float
    updates: int
    """Gradients that were applied, over all workers."""
    staleness: dict[int, int]
    """How often a gradient was so many updates behind."""
    queueing: float
    """Mean seconds that a message took longer because others used the server's link."""

    @property
    def updates_per_second(self) -> float:
        """Gradients applied per second."""
        return self.updates / self.seconds

    @property
    def mean_staleness(self) -> float:
        """Updates that a gradient was behind, on average."""
        total = sum(self.staleness.values())
        return sum(k * n for k, n in self.staleness.items()) / total if total else 0.0


class _Lane:
    """One direction of a server's link.

    `fair`: messages share it equally, as TCP connections do. Virtual time V runs at
    1/k of real time while k messages are under way; a message that came at V_0 with w
    seconds of work is through at V_0 + w, so a heap of these is all there is to keep.
    `fifo`: one message at a time, first come first served.
    """

    def __init__(self, sharing: str) -> None:
        self.fair = sharing == "fair"
        self.virtual = self.last = 0.0
        self.under_way: list[tuple[float, int]] = []
        self.turn = 0
        """Counts changes, so that an end which was put off is known to be out of date."""

    def add(self, now: float, message: int, work: float) -> None:
        self.advance(now)
        behind = self.virtual
        if not self.fair and self.under_way:
            behind = self.under_way[-1][0]
        entry = (behind + work, message)
        if self.fair:
            heapq.heappush(self.under_way, entry)
        else:
            self.under_way.append(entry)  # in order of arrival, which is that of their ends

    def advance(self, now: float) -> None:
        share = max(1, len(self.under_way)) if self.fair else 1
        self.virtual += (now - self.last) / share
        self.last = now
        self.turn += 1

    def next_end(self) -> float:
        share = len(self.under_way) if self.fair else 1
        return self.last + max(0.0, self.under_way[0][0] - self.virtual) * share

    def finish(self, now: float) -> int:
        self.advance(now)
        return heapq.heappop(self.under_way)[1] if self.fair else self.under_way.pop(0)[1]


class _Servers:
    """The state of a simulation: lanes into and out of every server, and who waits."""

    def __init__(self, task: ServerTask) -> None:
        self.task = task
        self.random = random.Random(task.seed)
        self.part = task.size / task.servers / task.bandwidth
        # Lanes 0 to S-1 lead into the servers, S to 2S-1 out of them.
        self.lanes = [_Lane(task.sharing) for _ in range(2 * task.servers)]
        self.version = 0
        self.seen = [0] * len(task.compute)
        self.left = [task.updates] * len(task.compute)
        self.sent = [0] * len(task.compute)
        self.asked = [0.0] * len(task.compute)
        self.staleness: Counter[int] = Counter()
        self.queued = 0.0
        self.messages = 0
        self.waiting: list[int] = []
        self.end = 0.0
        self.events: list[tuple[float, int, str, int, int]] = []
        self.count = 0

    def push(self, when: float, what: str, subject: int, detail: int = 0) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, what, subject, detail))

    def run(self) -> ServerRun:
        for worker in range(len(self.task.compute)):
            self.begin(worker, 0.0)
        actions = {
            "send": self._send,
            "fetch": self._fetch,
            "lane": self._lane,
            "apply": self._apply,
            "done": self._done,
        }
        while self.events:
            now, _, what, subject, detail = heapq.heappop(self.events)
            actions[what](now, subject, detail)
        applied = self.task.updates * len(self.task.compute)
        return ServerRun(
            self.end, applied, dict(self.staleness), self.queued / max(1, self.messages)
        )

    def begin(self, worker: int, now: float) -> None:
        if not self.left[worker]:
            return
        self.left[worker] -= 1
        mean = self.task.compute[worker]
        noise = max(0.0, self.random.gauss(1.0, self.task.deviation)) if self.task.deviation else 1
        self.push(now + mean * noise, "send", worker)

    def _send(self, now: float, worker: int, _: int) -> None:
        self.sent[worker] = 0
        self._enter(now, worker, out=False)

    def _fetch(self, now: float, worker: int, _: int) -> None:
        self.seen[worker] = self.version
        self.sent[worker] = 0
        self._enter(now, worker, out=True)

    def _enter(self, now: float, worker: int, *, out: bool) -> None:
        """Put the worker's next part on a lane."""
        # Workers begin with different servers, or all would queue at the first one.
        server = (worker + self.sent[worker]) % self.task.servers
        place = server + (self.task.servers if out else 0)
        self.asked[worker] = now
        self.lanes[place].add(now, worker, self.part)
        self.push(self.lanes[place].next_end(), "lane", place, self.lanes[place].turn)

    def _lane(self, now: float, place: int, turn: int) -> None:
        lane = self.lanes[place]
        if turn != lane.turn:
            return  # another message came or went since: its event tells the end
        worker = lane.finish(now)
        if lane.under_way:
            self.push(lane.next_end(), "lane", place, lane.turn)
        self.queued += now - self.asked[worker] - self.part
        self.messages += 1
        self.sent[worker] += 1
        out = place >= self.task.servers
        if self.sent[worker] < self.task.servers:
            self._enter(now, worker, out=out)
        else:
            self.push(now + self.task.latency, "done" if out else "apply", worker)

    def _apply(self, now: float, worker: int, _: int) -> None:
        if self.task.asynchronous:
            self.staleness[self.version - self.seen[worker]] += 1
            self.version += 1
            self.push(now, "fetch", worker)
            return
        self.waiting.append(worker)
        if len(self.waiting) == len(self.task.compute):
            self.staleness[0] += len(self.waiting)
            self.version += 1
            for each in self.waiting:
                self.push(now, "fetch", each)
            self.waiting = []

    def _done(self, now: float, worker: int, _: int) -> None:
        self.end = max(self.end, now)
        self.begin(worker, now)


def simulate_servers(task: ServerTask) -> ServerRun:
    """Workers compute, push their gradient to every server and pull the new weights.

    `sync`: weights are given out when the last worker's gradient is there. A gradient's
    staleness counts the updates between the weights it was computed from and those it is
    applied to.
    """
    if not task.compute or task.servers < 1 or task.updates < 1 or task.bandwidth <= 0:
        raise ConfigError(
            f"{len(task.compute)} workers, {task.servers} servers, {task.updates} updates and a"
            f" bandwidth of {task.bandwidth:g} must all be above 0"
        )
    return _Servers(task).run()


@dataclass(frozen=True)
class StragglerRun:
    """Synchronous steps of nodes that are slow by chance."""

    seconds: float
    """Mean per step."""
    waiting: float
    """Mean seconds per step that an average node waits."""


def simulate_stragglers(
    compute: Sequence[float],
    *,
    deviation: float,
    every: int = 1,
    steps: int = 200,
    backups: int = 0,
    stall: tuple[float, float] = (0.0, 0.0),
    seed: int = 0,
) -> StragglerRun:
    """Nodes compute, then wait for each other after `every` steps.

    Each step's time is normal around the node's own, never below a tenth of it. With
    `stall = (p, s)` a step is held up by s seconds with probability p. With `backups`
    the step goes on without that many of the slowest.
    """
    if not compute or backups >= len(compute) or every < 1:
        raise ConfigError(
            f"{len(compute)} nodes with {backups} backups, meeting every {every} steps: at least"
            " one node must be waited for, every step or more rarely"
        )
    chance, held_up = stall
    draw = random.Random(seed)
    total = own = 0.0
    rounds = max(1, steps // every)
    for _ in range(rounds):
        ends = []
        for mean in compute:
            end = 0.0
            for _ in range(every):
                end += mean * max(0.1, draw.gauss(1.0, deviation)) if deviation else mean
                if chance and draw.random() < chance:
                    end += held_up
            ends.append(end)
        if backups:
            ends = heapq.nsmallest(len(ends) - backups, ends)
        total += max(ends)
        own += sum(ends) / len(ends)
    return StragglerRun(total / (rounds * every), (total - own) / (rounds * every))
