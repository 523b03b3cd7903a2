"""A sealed connection over TCP that never blocks, and how one is opened."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Sequence

from paceline.secure.sealing import Sealing, UnknownPeerError

CHUNK = 2**18
"""Bytes that are read or sent in one call."""
PROOF_SECONDS = 10.0
"""Whoever has not proved by then that it knows the secret is left."""
_REFUSALS = 5
"""A door that many strangers press into may drop us too: so often we ask before we give up."""
_PAUSE = 0.05

DEAD_SECONDS = 10.0
"""After which a connection is given up through which nothing comes."""
_PROBE_SECONDS = 2
"""Between two tries of the kernel to hear from the other end."""


class Line:
    """Messages of bytes over a connected socket."""

    def __init__(self, connection: socket.socket, sealing: Sealing) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_dead_links(connection)
        self.connection = connection
        self._sealing = sealing
        self._outgoing = bytearray(sealing.take_output())

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def is_known(self) -> bool:
        """The other end has proved that it knows the secret."""
        return self._sealing.is_known

    @property
    def is_waiting(self) -> bool:
        """True while something is left to send."""
        return bool(self._outgoing)

    def send_bytes(self, body: bytes) -> None:
        """Queue a message and send what goes without waiting."""
        self._outgoing += self._sealing.seal(body)
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

    def greet(self) -> bool:
        """One step of the handshake: one read of what the step wants at most; False: refused."""
        try:
            data = self.connection.recv(self._sealing.wanted)
            if not data:
                return False
            self._sealing.feed(data)
        except BlockingIOError:
            return True
        except OSError:  # UnknownPeerError is one
            return False
        self._outgoing += self._sealing.take_output()
        self.flush()
        return True

    def receive_bytes(self) -> tuple[list[bytes], bool]:
        """Messages that have arrived, and whether the connection is still open and honest."""
        messages: list[bytes] = []
        while True:
            try:
                data = self.connection.recv(CHUNK)
                if not data:
                    return messages, False
                messages += self._sealing.feed(data)
            except BlockingIOError:
                return messages, True
            except OSError:
                return messages, False

    def wait(self, seconds: float) -> None:
        """Until something comes, or goes that has to."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll.poll(max(0.0, seconds) * 1000)
        self.flush()

    def allow_silence(self, seconds: float) -> None:
        """Let the kernel keep the connection for so long while nothing comes through."""
        if self.connection.fileno() >= 0:
            _notice_dead_links(self.connection, seconds)

    def close(self) -> None:
        if self.connection.fileno() >= 0:
            self.flush()
            self.connection.close()


def _notice_dead_links(connection: socket.socket, seconds: float = DEAD_SECONDS) -> None:
    """Let the kernel break a connection whose other end has silently gone.

    The kernel answers for a process that is merely stopped, so Ctrl-Z ends nothing.
    """
    tries = min(127, max(1, round(seconds / _PROBE_SECONDS) - 1))  # Linux takes no more
    pause = max(_PROBE_SECONDS, min(32767, round(seconds / (tries + 1))))
    wanted = (("TCP_KEEPIDLE", pause), ("TCP_KEEPINTVL", pause), ("TCP_KEEPCNT", tries))
    most = min(round(seconds * 1000), 2**31 - 1)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (*wanted, ("TCP_USER_TIMEOUT", most)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def prove(connection: socket.socket, sealing: Sealing) -> None:
    """The whole handshake on a socket with a timeout, from either end."""
    deadline = time.monotonic() + PROOF_SECONDS
    connection.sendall(sealing.take_output())
    while not sealing.is_known:
        data = connection.recv(sealing.wanted)
        if not data or time.monotonic() > deadline:
            raise UnknownPeerError("it hung up: it does not know this run's secret")
        sealing.feed(data)
        connection.sendall(sealing.take_output())


def connect(
    addresses: Sequence[tuple[str, int]],
    secret: str,
    purpose: str,
    *,
    seconds: float = 5.0,
    patience: float = 0.0,
) -> tuple[socket.socket, Sealing]:
    """A proved connection to the first of several addresses that answers.

    `patience`: for so long nobody may listen there yet.
    """
    end = time.monotonic() + patience
    refusals = 0
    while True:
        failures = []
        for address in addresses:
            try:
                return _connect(address, secret, purpose, seconds)
            except UnknownPeerError as error:
                refusals += 1
                failures.append(f"{address[0]}:{address[1]} ({error})")
            except OSError as error:
                failures.append(f"{address[0]}:{address[1]} ({error.strerror or error})")
        retries = 0 < refusals < _REFUSALS * len(addresses)
        if not retries and (refusals or time.monotonic() > end):
            raise ConnectionError(", ".join(failures))
        time.sleep(_PAUSE * (refusals + 1))


def _connect(
    address: tuple[str, int], secret: str, purpose: str, seconds: float
) -> tuple[socket.socket, Sealing]:
    connection = socket.create_connection(address, timeout=seconds)
    try:
        sealing = Sealing(secret, purpose, asks=True)
        connection.settimeout(PROOF_SECONDS)
        prove(connection, sealing)
        return connection, sealing
    except BaseException:
        connection.close()
        raise
