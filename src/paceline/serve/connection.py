"""One connection: slow clients are cut off, small requests are answered without a task.

A request that is wholly here soon after its head goes to the application's `quick`, and its answer
is one write. Everything else (bodies that are large or slow, refusals, pages) takes uvicorn's way
through ASGI, where all limits are.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEADER_SECONDS = 10.0
"""Until the head of a request must have arrived: who sends a byte a minute is cut off."""
HEADER_BYTES = 64 << 10
"""Of the head of a request."""
QUICK_SECONDS, QUICK_BYTES = 0.05, 64 << 10
"""Within which a small body arrives whole, if often in two pieces."""
QUICK_ENDS = (b":predict", b":classify", b"/infer")


class _NoEvent:
    def set(self) -> None:
        """Nobody waits."""


class Reply:
    """The answer that a quick request waits for; to uvicorn it is the connection's cycle."""

    __slots__ = ("_connection", "disconnected", "keep_alive", "response_complete")
    message_event = _NoEvent()

    def __init__(self, connection: Cautious, keep_alive: bool) -> None:
        self._connection, self.keep_alive = connection, keep_alive
        self.disconnected = self.response_complete = False

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """One whole answer in one write: the client is woken up once."""
        self.response_complete = True
        transport = self._connection.transport
        if self.disconnected or transport.is_closing():
            return
        if "connection" in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers = {**headers, "connection": "close"}
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = f"{lines}content-length: {len(body)}\r\n\r\n".encode("latin-1")
        transport.write(STATUS_LINE[status] + head + body)
        if not self.keep_alive:
            transport.close()
        self._connection.on_response_complete()


class Cautious(HttpToolsProtocol):
    """Cuts off who takes too long, or too many bytes, for the head of a request."""

    _body: list[bytes] | None = None
    """Of a request that may be quick, until it is all here."""
    _fallback: asyncio.TimerHandle | None = None

    _timer: asyncio.TimerHandle | None = None
    _head = 0
    _complete = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._timer is not None:
            self._head += len(data)
            before = self._head - len(data)
            self._feed(data)
            if self._timer is not None and before > HEADER_BYTES:
                self._cut()
            return
        begins = self._body is None and (self.cycle is None or self.cycle.response_complete)
        self._complete = False
        self._feed(data)
        if begins and not self._complete:  # mostly a head comes as a whole, and needs no timer
            self._wait_for_head()
            self._head = len(data)

    def _feed(self, data: bytes) -> None:
        super().data_received(data)
        if self._body is not None and self._fallback is None:
            self._fallback = self.loop.call_later(QUICK_SECONDS, self._take_the_long_way)

    def on_headers_complete(self) -> None:
        self._complete = True
        self._stop()
        if self._may_be_quick():
            self._body = []
        else:
            super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._drop()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._stop()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._cut)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._head = None, 0

    def _cut(self) -> None:
        self._stop()
        self.transport.close()

    def _may_be_quick(self) -> bool:
        cycle, limit = self.cycle, self.limit_concurrency
        return (
            self.url.endswith(QUICK_ENDS)
            and hasattr(self.app, "quick")
            and (cycle is None or cycle.response_complete)
            and not (self.expect_100_continue or self.flow.write_paused or b"%" in self.url)
            and self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and not self.parser.should_upgrade()
            and (limit is None or len(self.connections) < limit)
        )

    def _take_the_long_way(self) -> None:
        """The request that was held back goes to ASGI, with what is here of its body."""
        pieces = self._drop()
        if pieces is None or self.transport.is_closing():
            return
        super().on_headers_complete()
        for piece in pieces:
            super().on_body(piece)

    def _drop(self) -> list[bytes] | None:
        pieces, self._body = self._body, None
        if self._fallback is not None:
            self._fallback.cancel()
            self._fallback = None
        return pieces

    def on_body(self, body: bytes) -> None:
        if self._body is None:
            super().on_body(body)
            return
        self._body.append(body)
        if sum(map(len, self._body)) > QUICK_BYTES:
            self._take_the_long_way()

    def on_message_complete(self) -> None:
        pieces = self._body
        if pieces is not None:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            reply = Reply(self, self.parser.should_keep_alive())
            before, self.cycle = self.cycle, reply  # type: ignore[assignment]
            app: Any = self.app
            if app.quick(self.url.decode("ascii"), self.headers, body, reply):
                self._drop()
                return
            self.cycle = before
            self._take_the_long_way()
        super().on_message_complete()

    def shutdown(self) -> None:
        self._take_the_long_way()  # a request that has begun is answered
        super().shutdown()
