"""Where strangers knock: listening sockets that let in only who knows the secret.

Of a stranger nothing is kept but the few bytes of its handshake. There are at most `MOST_STRANGERS`
at a time, the oldest goes first, and whatever one of them does drops that one alone.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from paceline.secure.line import PROOF_SECONDS, Line
from paceline.secure.sealing import Sealing

MOST_STRANGERS = 64
"""Connections that have not proved anything yet; more than any cluster's agents in one moment."""
_AT_ONCE = 16
"""Connections that are taken in one turn; a crowd waits in the kernel's queue."""
_REST_SECONDS = 0.05
"""Pause of the listener after a full turn, so that a crowd cannot keep its process busy."""
_BACKLOG = 512

LineType = TypeVar("LineType", bound=Line)


class Door(Generic[LineType]):
    """Listens at the addresses that are needed, and hands over who has proved itself."""

    def __init__(
        self,
        secret: str,
        purpose: str,
        selector: selectors.BaseSelector,
        make: Callable[[socket.socket, Sealing], LineType],
    ) -> None:
        self._secret, self._purpose = secret, purpose
        self._selector, self._make = selector, make
        self._listeners: dict[str, socket.socket] = {}
        self._strangers: dict[LineType, float] = {}
        self._resting_until = 0.0

    def listen(self, address: str, port: int = 0) -> int:
        """Listen at an address of this machine too; the port, another if that one is taken."""
        if address in self._listeners:
            return int(self._listeners[address].getsockname()[1])
        try:
            listener = socket.create_server((address, port), backlog=_BACKLOG)
        except OSError as error:
            if not port or error.errno != errno.EADDRINUSE:
                raise
            listener = socket.create_server((address, 0), backlog=_BACKLOG)
        listener.setblocking(False)
        self._listeners[address] = listener
        self._selector.register(listener, selectors.EVENT_READ, self)
        return int(listener.getsockname()[1])

    @property
    def strangers(self) -> int:
        """How many stand at the door."""
        return len(self._strangers)

    def attend(self, source: object) -> LineType | None:
        """One step for whatever of the door's has something to read; who may come in, or None."""
        if source in self._listeners.values():
            assert isinstance(source, socket.socket)
            self._accept(source)
            return None
        line: LineType = source  # type: ignore[assignment]
        if line not in self._strangers:  # dropped in this very turn
            return None
        try:
            honest = line.greet()
        except Exception:  # whatever it is, it is this stranger's alone
            honest = False
        if not honest:
            self._drop(line)
            return None
        if not line.is_known:
            return None
        del self._strangers[line]
        self._selector.unregister(line)
        return line

    def look(self) -> None:
        """Drop who has stood there for too long; listen again after a rest. Once per turn."""
        now = time.monotonic()
        for line in [s for s, since in self._strangers.items() if now - since > PROOF_SECONDS]:
            self._drop(line)
        if self._resting_until and now >= self._resting_until:
            self._resting_until = 0.0
            for listener in self._listeners.values():
                with contextlib.suppress(KeyError):  # it was opened meanwhile
                    self._selector.register(listener, selectors.EVENT_READ, self)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    break  # no descriptors left: who waits stays readable and would make us spin
                continue
            try:
                line = self._make(connection, Sealing(self._secret, self._purpose, asks=False))
            except OSError:
                connection.close()
                continue
            while len(self._strangers) >= MOST_STRANGERS:
                self._drop(next(iter(self._strangers)))
            self._strangers[line] = time.monotonic()
            self._selector.register(line, selectors.EVENT_READ, self)
        self._rest()

    def _rest(self) -> None:
        self._resting_until = time.monotonic() + _REST_SECONDS
        for listener in self._listeners.values():
            with contextlib.suppress(KeyError):
                self._selector.unregister(listener)

    def _drop(self, line: LineType) -> None:
        self._strangers.pop(line, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line)
        with contextlib.suppress(OSError):
            line.close()

    def close(self) -> None:
        """Close the door and whatever stands at it."""
        for line in list(self._strangers):
            self._drop(line)
        for listener in self._listeners.values():
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()
