"""The core: an ASGI application that finds the version, asks its batcher, and answers.

    POST /v1/models/NAME[/versions/V|/labels/L]:predict|:classify     TensorFlow Serving
    POST /v2/models/NAME[/versions/V]/infer                           Open Inference Protocol
    GET  ...                                                          `routes`

Inference takes the short way (`quick`, where its numbers come whole); everything else goes through
Starlette's router.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from paceline.errors import DataError, shortened
from paceline.local.cores import usable_cores
from paceline.serve import messages
from paceline.serve.batcher import Outcome, QueueFullError, TooLateError
from paceline.serve.connection import Reply
from paceline.serve.door import Access
from paceline.serve.loader import one_thread
from paceline.serve.manager import Entry, Manager, NotServedError
from paceline.serve.messages import Request
from paceline.serve.refusals import RefusalError
from paceline.serve.statistics import Statistics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_NAME = r"(?P<name>[^/:]+)"
INFERENCE = re.compile(
    rf"/v1/models/{_NAME}(?:/versions/(?P<number>\d{{1,16}})|/labels/(?P<label>[^/:]+))?"
    r":(?P<verb>predict|classify)"
    rf"|/v2/models/(?P<name2>[^/]+)(?:/versions/(?P<number2>\d{{1,16}}))?/infer"
)
OPEN = frozenset({"/", "/docs", "/v2/health/live", "/v2/health/ready"})
"""What needs no token: the page, which asks for it, and whether the server is there."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What requests may ask for."""

    body: int = 32 << 20
    """Bytes of one body."""
    bodies: int = 256 << 20
    """Bytes of all bodies that are being read or computed."""
    samples: int = 1024
    """Of one request."""
    pixels: int = 50_000_000
    """Of a picture: decoded, it takes three bytes each."""
    seconds: float = 30.0
    """Until a request must be answered; a client may ask for less with X-Request-Timeout."""
    body_seconds: float = 15.0
    """Until a body must have arrived."""


class Core:
    """One server's application."""

    def __init__(
        self, manager: Manager, limits: Limits, access: Access, rest: Callable[[Core], App]
    ) -> None:
        self.manager, self.limits, self.access = manager, limits, access
        self.statistics = Statistics()
        self.draining = False
        self._bodies = 0
        self._decoders = ThreadPoolExecutor(
            usable_cores(), thread_name_prefix="paceline-decode", initializer=one_thread
        )
        self._rest = rest(self)

    def close(self) -> None:
        self._decoders.shutdown(wait=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        headers = _headers(scope["headers"])
        try:
            self.access.admit(headers, is_open=scope["path"] in OPEN)
            asked = INFERENCE.fullmatch(scope["path"])
            if asked is None:
                await self._rest(scope, receive, send)
                return
            if scope["method"] != "POST":
                raise RefusalError(405, "inference is asked for with POST", {"allow": "POST"})
            await self._infer(asked, headers, receive, send)
        except RefusalError as refusal:
            self.statistics.refuse(refusal.status)
            await answer_refusal(refusal, send)

    def quick(
        self, path: str, pairs: Sequence[tuple[bytes, bytes]], body: bytes, reply: Reply
    ) -> bool:
        """Begin to answer numbers that are all here, without a task.

        False, with nothing done, for whatever else it is: refusals, too, take the long way.
        """
        start, headers, size = time.perf_counter(), _headers(pairs), len(body)
        if (
            size > self.limits.body
            or self._bodies + size > self.limits.bodies
            or not _SLOW.isdisjoint(headers)
            or b'"b64"' in body[:64]
        ):
            return False
        try:
            self.access.admit(headers, is_open=False)
            asked = INFERENCE.fullmatch(path)
            if asked is None:
                return False
            entry = self._entry(asked)
            batcher = entry.batcher
            if batcher is None:
                return False
            request, kind = self._parse(asked, headers, body, entry)
        except RefusalError:
            return False
        inputs = request.numbers
        most = min(self.limits.samples, batcher.servable.setup.batch)
        if inputs is None or not 0 < len(inputs) <= most or not batcher.has_room(len(inputs)):
            return False

        def tell(outcome: Outcome) -> None:
            self._bodies -= size
            batcher.requests -= 1
            self.manager.leave(entry)
            status, more = 200, _JSON
            if isinstance(outcome, BaseException):
                refusal = _refusal(entry, outcome)
                status, text = refusal.status, orjson.dumps({"error": refusal.reason})
            else:
                try:
                    text, more = self._answer(kind, outcome, request, entry)
                except RefusalError as refusal:
                    status, text = refusal.status, orjson.dumps({"error": refusal.reason})
            samples = len(inputs) if status == 200 else 0
            record.note(status, time.perf_counter() - start, samples)
            reply.send(status, text, more)

        record = self.statistics.of(entry.name, entry.number)
        self._bodies += size
        batcher.requests += 1
        self.manager.enter(entry)
        batcher.add(inputs, asyncio.get_running_loop().time() + self.limits.seconds, tell)
        return True

    async def _infer(
        self, asked: re.Match[str], headers: dict[str, str], receive: Receive, send: Send
    ) -> None:
        start = time.perf_counter()
        entry = self._entry(asked)
        record = self.statistics.of(entry.name, entry.number)
        samples = 0
        try:
            deadline = asyncio.get_running_loop().time() + self._patience(headers)
            try:
                size = self._reserve(headers)
            except RefusalError:
                await self._read_away(receive)
                raise
            batcher = entry.batcher
            if batcher is not None:  # else it is loaded again
                batcher.requests += 1
            try:
                body = await self._body(receive, size, headers)
                async with self.manager.using(entry):
                    assert entry.about is not None
                    request, kind = self._parse(asked, headers, body, entry)
                    inputs = await self._inputs(request, entry)
                    samples = len(inputs)
                    outputs = await self._outputs(entry, inputs, deadline)
            finally:
                self._bodies -= size
                if batcher is not None:
                    batcher.requests -= 1
            text, more = self._answer(kind, outputs, request, entry)
        except RefusalError as refusal:
            record.note(refusal.status, time.perf_counter() - start, 0)
            await answer_refusal(refusal, send)
            return
        except NotServedError as error:
            record.note(503, time.perf_counter() - start, 0)
            await answer_refusal(RefusalError(503, str(error), {"retry-after": "1"}), send)
            return
        record.note(200, time.perf_counter() - start, samples)
        await answer(200, text, more, send)

    def _entry(self, asked: re.Match[str]) -> Entry:
        number = asked["number"] or asked["number2"]
        try:
            return self.manager.find(
                asked["name"] or asked["name2"], int(number) if number else None, asked["label"]
            )
        except NotServedError as error:
            if error.known:
                raise RefusalError(503, str(error), {"retry-after": "1"}) from None
            raise RefusalError(404, shortened(str(error))) from None

    def _patience(self, headers: dict[str, str]) -> float:
        text = headers.get("x-request-timeout")
        if text is None:
            return self.limits.seconds
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not seconds > 0:
            raise RefusalError(400, "X-Request-Timeout must be a number of seconds above 0")
        return min(seconds, self.limits.seconds)

    def _reserve(self, headers: dict[str, str]) -> int:
        """Room for a body: all of them together are bounded, whoever sends them."""
        text = headers.get("content-length", "")
        size = int(text) if text.isdecimal() and len(text) < 20 else self.limits.body
        if size > self.limits.body:
            raise RefusalError(413, f"the body has more than {self.limits.body:,} bytes: split it")
        if self._bodies + size > self.limits.bodies:
            raise RefusalError(503, "too many requests at once", {"retry-after": "1"})
        self._bodies += size
        return size

    async def _read_away(self, receive: Receive) -> None:
        """Take a body that is refused, up to a bound, and keep none of it.

        Whoever still sends when the connection is closed sees a reset instead of the answer.
        """
        total = 0
        with contextlib.suppress(RefusalError):
            message = await self._part(receive)
            while message.get("more_body") and total <= self.limits.body:
                total += len(message.get("body", b""))
                message = await self._part(receive)

    async def _body(self, receive: Receive, size: int, headers: dict[str, str]) -> bytes:
        if headers.get("content-encoding", "identity") != "identity":
            raise RefusalError(415, "a body must not be compressed")
        message = await self._part(receive)
        if not message.get("more_body"):
            return self._whole(message, size)
        chunks, total = [self._whole(message, size)], len(message.get("body", b""))
        end = asyncio.get_running_loop().time() + self.limits.body_seconds
        while message.get("more_body"):
            left = end - asyncio.get_running_loop().time()
            message = await self._part(receive, max(left, 0.0))
            total += len(message.get("body", b""))
            if total > size:
                raise RefusalError(413, f"the body has more than {size:,} bytes", _CLOSE)
            chunks.append(message.get("body", b""))
        return b"".join(chunks)

    def _whole(self, message: MutableMapping[str, Any], size: int) -> bytes:
        body: bytes = message.get("body", b"")
        if len(body) > size:
            raise RefusalError(413, f"the body has more than {size:,} bytes: split it", _CLOSE)
        return body

    async def _part(
        self, receive: Receive, seconds: float | None = None
    ) -> MutableMapping[str, Any]:
        try:
            async with asyncio.timeout(self.limits.body_seconds if seconds is None else seconds):
                message = await receive()
        except TimeoutError:
            raise RefusalError(
                408, f"the body did not arrive within {self.limits.body_seconds:g} s", _CLOSE
            ) from None
        if message["type"] == "http.disconnect":
            raise RefusalError(499, "the client has gone")
        return message

    def _parse(
        self, asked: re.Match[str], headers: dict[str, str], body: bytes, entry: Entry
    ) -> tuple[Request, str]:
        about = entry.about
        assert about is not None
        content = headers.get("content-type", "").partition(";")[0].strip().lower()
        if asked["name2"]:
            return messages.v2_request(body, headers, about), "v2"
        if content.startswith("image/") or content == "application/octet-stream":
            return Request(pictures=(body,)), "picture"
        if asked["verb"] == "classify":
            if not about.tells_classes:
                raise RefusalError(400, f"the outputs of {entry.name} are no scores of classes")
            return messages.classify_request(body, about), "classify"
        return messages.tensorflow_request(body, about), "predict"

    async def _inputs(self, request: Request, entry: Entry) -> np.ndarray:
        count = len(request.pictures) if request.numbers is None else len(request.numbers)
        if not 0 < count <= self.limits.samples:
            raise RefusalError(
                413, f"{count} samples: a request has 1 to {self.limits.samples:,}; split it"
            )
        if request.numbers is not None:
            return request.numbers
        assert entry.batcher is not None
        prepare = entry.batcher.servable.preparer.picture
        loop = asyncio.get_running_loop()
        try:
            found = await asyncio.gather(
                *(
                    loop.run_in_executor(self._decoders, prepare, data, self.limits.pixels)
                    for data in request.pictures
                )
            )
        except DataError as error:
            raise RefusalError(400, str(error)) from None
        return found[0][None] if len(found) == 1 else np.stack(found)

    async def _outputs(self, entry: Entry, inputs: np.ndarray, deadline: float) -> np.ndarray:
        assert entry.batcher is not None
        try:
            return await entry.batcher.submit(inputs, deadline)
        except Exception as error:
            raise _refusal(entry, error) from None

    def _answer(
        self, kind: str, outputs: np.ndarray, request: Request, entry: Entry
    ) -> tuple[bytes, dict[str, str]]:
        assert entry.about is not None
        if not request.binary and not np.isfinite(outputs).all():  # orjson would write null
            raise RefusalError(
                500,
                f"{entry.name} version {entry.number} gives outputs that are not all finite"
                " numbers, which JSON does not have: look for nan in the inputs and the weights",
            )
        if kind == "v2":
            return messages.v2_answer(outputs, request, entry.name, entry.number)
        if kind == "classify":
            text = messages.classify_answer(outputs, entry.about)
        elif kind == "picture":
            text = messages.picture_answer(outputs, entry.about, entry.name, entry.number)
        else:
            text = messages.tensorflow_answer(outputs, request.named)
        return text, _JSON


_JSON = {"content-type": "application/json"}
_SLOW = frozenset({"x-request-timeout", "content-encoding"})
"""Headers that are looked at where every limit is."""


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}


def _refusal(entry: Entry, error: BaseException) -> RefusalError:
    """What a client is told of a request that was not computed."""
    if isinstance(error, QueueFullError):
        seconds = str(max(1, round(error.seconds)))
        return RefusalError(503, f"the queue of {entry.name} is full", {"retry-after": seconds})
    if isinstance(error, TooLateError):
        return RefusalError(504, "the deadline passed before the answer was there")
    return RefusalError(500, f"{entry.name} version {entry.number} failed: {shortened(str(error))}")


_CLOSE = {"connection": "close"}
"""What is left of a body that is not read must not be taken for the next request."""


async def answer_refusal(refusal: RefusalError, send: Send) -> None:
    """`{"error": "..."}`, in every protocol."""
    headers = {"content-type": "application/json", **refusal.headers}
    await answer(refusal.status, orjson.dumps({"error": refusal.reason}), headers, send)


async def answer(status: int, body: bytes, headers: dict[str, str], send: Send) -> None:
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    pairs.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
