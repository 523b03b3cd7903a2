"""Messages between a worker and a server: a few numbers, then perhaps a vector or a text.

Every pair of a worker and a server has a connection of its own. Over Gloo that is a
group of two members, so that a process that dies breaks this connection and no other.
Over MPI it is messages between two ranks of the one group that there is, and a dead
rank ends the run.
"""

from __future__ import annotations

import datetime
import json
import math
import time
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any

import torch

from paceline.errors import PacelineError, WorkerError
from paceline.exchange.network import Traffic


class Kind(IntEnum):
    """What a worker, or a server of another group, asks of a server."""

    HELLO = 1
    PUSH = 2
    PULL = 3
    TOTAL = 4
    REPORT = 5
    STATE = 6
    DONE = 7
    ALIVE = 8
    MIX = 9
    SEED = 10


@dataclass(frozen=True, kw_only=True)
class Request:
    """What comes before everything that a worker sends."""

    kind: int
    update: int = 0
    sequence: int = 0
    """Which total of this update."""
    rate: float = 1.0
    """The learning rate, relative to the one that the optimizer was made with."""
    samples: int = 0
    """Samples that the gradient was computed from."""
    total: int = 0
    """Samples of the global batch."""
    stop: bool = False
    """The worker wishes that training stops."""
    joins: bool = False
    """HELLO: the worker comes to a training that runs."""
    length: int = 0
    """Elements of what follows."""
    loss_sum: float = 0.0
    correct: float = 0.0
    seen: float = 0.0
    """Losses, right answers and samples of updates since the last request that told them."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What comes before everything that a server sends."""

    version: int = 0
    """Updates that the server has applied (HELLO: the update to begin with)."""
    stop: int = 0
    """The update after which all stop; 0 while nobody wishes that."""
    news: int = 0
    """Lines that the server has had to say so far."""
    length: int = 0
    failed: bool = False
    """What follows is the sentence that ends the run."""


_REQUEST, _ANSWER = len(astuple(Request(kind=0))), len(astuple(Answer()))


class LostError(Exception):
    """The other end of a connection is gone."""


class BadMessageError(Exception):
    """What a node has sent is not what it should be; the words go on after its name."""

    def __init__(self, words: str, remedy: str = "") -> None:
        super().__init__(words)
        self.remedy = remedy

    def sentence(self, sender: str, host: str) -> str:
        """What the sender is told by `host`, which has refused it."""
        end = f": {self.remedy}" if self.remedy else ""
        return f"{sender} {self} (refused by {host}){end}"


class Link:
    """One end of the connection of a worker and a server."""

    def __init__(self, group: Any, peer: int, traffic: Traffic, *, patience: float) -> None:
        self.group, self.peer, self.traffic = group, peer, traffic
        self._patience = datetime.timedelta(seconds=patience)

    def send(self, tensor: torch.Tensor) -> None:
        """Send a contiguous vector."""
        self.traffic.bytes_sent += tensor.nbytes
        self.traffic.messages_sent += 1
        self._wait(lambda: self.group.send([tensor], self.peer, 0))

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Receive into a contiguous vector."""
        self.traffic.bytes_received += tensor.nbytes
        self.traffic.messages_received += 1
        self._wait(lambda: self.group.recv([tensor], self.peer, 0))
        return tensor

    def _wait(self, start: Any) -> None:
        before = time.perf_counter()
        try:
            start().wait(self._patience)
        except (RuntimeError, PacelineError) as error:
            raise LostError(str(error).strip().splitlines()[0]) from error
        elapsed = time.perf_counter() - before
        self.traffic.seconds += elapsed
        self.traffic.waited += elapsed

    def ask(self, request: Request) -> None:
        """Begin a request."""
        self.send(torch.tensor(astuple(request), dtype=torch.float64))

    def asked(self) -> Request:
        """The next request."""
        values = self.receive(torch.empty(_REQUEST, dtype=torch.float64)).tolist()
        kind, update, sequence, rate, samples, total, stop, joins, length, *told = values
        if not all(map(math.isfinite, (kind, update, sequence, samples, total, length))):
            raise BadMessageError("sent a request whose numbers are not finite")
        return Request(
            kind=int(kind),
            update=int(update),
            sequence=int(sequence),
            rate=rate,
            samples=int(samples),
            total=int(total),
            stop=bool(stop),
            joins=bool(joins),
            length=int(length),
            loss_sum=told[0],
            correct=told[1],
            seen=told[2],
        )

    def answer(self, answer: Answer) -> None:
        """Begin an answer."""
        self.send(torch.tensor(astuple(answer), dtype=torch.float64))

    def answered(self) -> Answer:
        """The answer's beginning; the run ends here when the server says so."""
        values = self.receive(torch.empty(_ANSWER, dtype=torch.float64)).tolist()
        version, stop, news, length, failed = values
        if failed:
            raise WorkerError(self.text(int(length)))
        return Answer(version=int(version), stop=int(stop), news=int(news), length=int(length))

    def send_text(self, text: str) -> None:
        """Send the bytes of a text, whose number was sent before."""
        self.send(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))

    def text(self, length: int) -> str:
        """A text of so many bytes."""
        return bytes(self.receive(torch.empty(length, dtype=torch.uint8)).tolist()).decode()

    def json(self, length: int) -> Any:
        """What a text of so many bytes says."""
        return json.loads(self.text(length))

    def close(self) -> None:
        """Leave the connection; MPI's group is not this connection's own."""
        self.group = None
