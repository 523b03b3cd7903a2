"""Messages between a worker and a server: a few numbers, then perhaps a vector or a text.

Every pair of a worker and a server has a connection of its own. Over Gloo that is a
group of two members, so that a process that dies breaks this connection and no other.
Over MPI it is messages between two ranks of the one group that there is, and a dead
rank ends the run.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import struct
import time
from dataclasses import astuple, dataclass, replace
from enum import IntEnum
from typing import Any

import torch

from paceline.errors import PacelineError, WorkerError
from paceline.exchange.network import Traffic
from paceline.local.finite import DIVERGED, bad_of, is_finite
from paceline.schema.plain import checked, parse_json
from paceline.secure.sealing import MAC_BYTES, Sealing, UnknownPeerError


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
    PRESENT = 10
    SEED = 11


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


_REQUEST = struct.Struct(f"<{len(astuple(Request(kind=0)))}d")
_ANSWER = struct.Struct(f"<{len(astuple(Answer()))}d")


def read_request(body: bytes) -> Request:
    """A request from its bytes; ValueError for what is none."""
    try:
        kind, update, sequence, rate, samples, total, stop, joins, length, *told = _REQUEST.unpack(
            body
        )
        return Request(
            kind=int(kind),
            update=int(update),
            sequence=int(sequence),
            rate=rate,
            samples=int(samples),
            total=int(total),
            stop=bool(stop),
            joins=bool(joins),
            length=_length(length),
            loss_sum=told[0],
            correct=told[1],
            seen=told[2],
        )
    except (struct.error, OverflowError, ValueError) as error:
        raise ValueError(f"no request ({error})") from None


def read_answer(body: bytes) -> Answer:
    """The beginning of an answer from its bytes; ValueError for what is none."""
    try:
        version, stop, news, length, failed = _ANSWER.unpack(body)
        return Answer(
            version=int(version),
            stop=int(stop),
            news=int(news),
            length=_length(length),
            failed=bool(failed),
        )
    except (struct.error, OverflowError) as error:
        raise ValueError(f"no answer: {error}") from None


def _length(value: float) -> int:
    length = int(value)
    if not 0 <= length < 2**40:
        raise ValueError(f"{value} is no length")
    return length


class ConnectionLostError(Exception):
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


class Connection:
    """One end of the connection of a worker and a server."""

    def __init__(
        self,
        group: Any,
        peer: int,
        traffic: Traffic,
        *,
        patience: float,
        sealing: Sealing | None = None,
    ) -> None:
        """`sealing`: what the two have proved; requests, answers and texts get its MACs."""
        self.group, self.peer, self.traffic = group, peer, traffic
        self._patience = datetime.timedelta(seconds=patience)
        self._sealing = sealing

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
            raise ConnectionLostError(str(error).strip().splitlines()[0]) from error
        elapsed = time.perf_counter() - before
        self.traffic.seconds += elapsed
        self.traffic.waited += elapsed

    def _send_sealed(self, body: bytes) -> None:
        mac = self._sealing.mac(body, sent=True) if self._sealing is not None else b""
        self.send(torch.frombuffer(bytearray(body + mac), dtype=torch.uint8))

    def _receive_sealed(self, length: int) -> bytes:
        macs = MAC_BYTES if self._sealing is not None else 0
        data = self.receive(torch.empty(length + macs, dtype=torch.uint8)).numpy().tobytes()
        if self._sealing is not None:
            try:
                self._sealing.verify(data[:length], data[length:])
            except UnknownPeerError as error:
                raise ConnectionLostError(str(error)) from error
        return data[:length]

    def ask(self, request: Request) -> None:
        self._send_sealed(_REQUEST.pack(*astuple(request)))

    def asked(self) -> Request:
        try:
            return read_request(self._receive_sealed(_REQUEST.size))
        except ValueError as error:
            raise BadMessageError(f"sent {error}") from error

    def answer(self, answer: Answer) -> None:
        self._send_sealed(_ANSWER.pack(*astuple(answer)))

    def answered(self) -> Answer:
        """The answer's beginning; the run ends here when the server says so."""
        try:
            answer = read_answer(self._receive_sealed(_ANSWER.size))
        except ValueError as error:
            raise ConnectionLostError(str(error)) from error
        if answer.failed:
            raise WorkerError(self.text(answer.length))
        return answer

    def send_text(self, text: str) -> None:
        """Send the bytes of a text, whose number was sent before."""
        self._send_sealed(text.encode())

    def ask_with(self, request: Request, text: str) -> None:
        self.ask(replace(request, length=len(text.encode())))
        self.send_text(text)

    def answer_with(self, answer: Answer, text: str) -> None:
        self.answer(replace(answer, length=len(text.encode())))
        self.send_text(text)

    def refuse(self, text: str) -> None:
        """Say why the run ends here, if anybody is left to be told."""
        with contextlib.suppress(ConnectionLostError):
            self.answer_with(Answer(failed=True), text)

    def text(self, length: int) -> str:
        """A text of so many bytes."""
        try:
            return self._receive_sealed(length).decode()
        except UnicodeDecodeError as error:
            raise BadMessageError("sent a text that is none") from error

    def json(self, length: int, shape: Any) -> Any:
        """What a text of so many bytes says, if it has that shape."""
        try:
            return checked(parse_json(self.text(length)), shape)
        except ValueError as error:
            raise BadMessageError(f"sent an answer that cannot be used: {error}") from error

    def close(self) -> None:
        """Leave the connection; MPI's group is not this connection's own."""
        self.group = None


MOST_TEXT = 64 * 2**20
"""Bytes of a text between nodes at most: notes of models are far shorter."""
MOST_NUMBERS = 2**24
"""Numbers of one sum over workers at most: those of evaluations and buffers are far fewer."""


def check_finite(values: torch.Tensor, what: str) -> None:
    if not is_finite(values):
        raise BadMessageError(f"sent {what} of which {bad_of(values)} are not finite", DIVERGED)


def check_request(request: Request, elements: int) -> None:
    """Refuse a request to a server whose shard has so many elements, if it makes no sense."""
    if request.kind not in list(Kind):
        raise BadMessageError(f"sent a request of the unknown kind {request.kind}")
    if request.update < 0 or request.sequence < 0 or request.length < 0:
        raise BadMessageError(f"sent a {Kind(request.kind).name} with a negative number")
    most = MOST_NUMBERS if request.kind == Kind.TOTAL else MOST_TEXT
    if request.kind == Kind.PUSH:
        if request.length != elements:
            raise BadMessageError(
                f"announced a gradient of {request.length} elements where the server has {elements}"
            )
    elif request.length > most:
        raise BadMessageError(f"announced {request.length} elements, more than {most}")


def check_push(request: Request, gradient: torch.Tensor) -> None:
    """Refuse a gradient that has come, if it or what was said of it makes no sense."""
    if request.samples < 0 or request.total <= 0:
        raise BadMessageError(f"sent a gradient of {request.samples} samples of {request.total}")
    if not (math.isfinite(request.rate) and request.rate >= 0):
        raise BadMessageError(f"sent a gradient at the rate {request.rate}")
    check_finite(gradient, f"a gradient for update {request.update + 1}")


def check_word(word: Any, numbers: tuple[str, ...]) -> None:
    """Refuse a word in which one of these is not a whole number, or what it told is not three."""
    try:
        good = (
            all(type(word[name]) is int and word[name] >= 0 for name in numbers)
            and len(word["told"]) == 3
            and all(type(number) in (int, float) for number in word["told"])
            and all(type(count) is int for count in word["staleness"].values())
            and type(word["stop"]) is bool
        )
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise BadMessageError("sent a word that says nothing")
