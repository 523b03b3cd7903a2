"""One end of a control connection: JSON lines over TCP, never blocking, never pickled."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

Message = dict[str, Any]

BEAT_SECONDS = 0.5
"""How often each side shows that it lives."""
SILENCE_SECONDS = 6.0
"""An agent that was not heard of for so long is lost."""
LONGEST_LINE = 64 * 2**20
MOST_WAITING = 2**20
"""Bytes in the queue above which beats and printed lines are left out: the other side is stuck."""
CHUNK = 2**18


class Channel:
    """Sends and receives messages over a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_dead_links(connection)
        self.connection = connection
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def is_waiting(self) -> bool:
        """True while something is left to send."""
        return bool(self._outgoing)

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message and send what goes without waiting."""
        if kind in ("beat", "line") and len(self._outgoing) > MOST_WAITING:
            return
        self._outgoing += json.dumps({"kind": kind, **fields}).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what goes without waiting; a broken connection shows when it is read."""
        try:
            while self._outgoing:
                sent = self.connection.send(self._outgoing[:CHUNK])
                del self._outgoing[:sent]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()

    def receive(self) -> tuple[list[Message], bool]:
        """Messages that have arrived, and whether the connection is still open."""
        is_open = True
        while is_open:
            try:
                data = self.connection.recv(CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            is_open = bool(data)
            self._incoming += data
        messages: list[Message] = []
        while (end := self._incoming.find(b"\n")) >= 0:
            line = bytes(self._incoming[:end])
            del self._incoming[: end + 1]
            try:
                message = json.loads(line)
            except ValueError:
                return messages, False  # no one of ours
            if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                return messages, False
            messages.append(message)
        return messages, is_open and len(self._incoming) < LONGEST_LINE

    def close(self) -> None:
        self.flush()
        self.connection.close()


def _notice_dead_links(connection: socket.socket) -> None:
    """Let the kernel break a connection whose other end has silently gone.

    The kernel answers for a process that is merely stopped, so Ctrl-Z ends nothing.
    """
    wanted = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 4))
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (*wanted, ("TCP_USER_TIMEOUT", 10_000)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(addresses: list[tuple[str, int]], seconds: float = 5.0) -> Channel:
    """A channel to the first of several addresses that answers."""
    failures = []
    for address in addresses:
        try:
            return Channel(socket.create_connection(address, timeout=seconds))
        except OSError as error:
            failures.append(f"{address[0]}:{address[1]} ({error.strerror or error})")
    raise ConnectionError(
        "the launcher cannot be reached at " + ", ".join(failures) + ": it has ended, or a firewall"
        " stands between"
    )
