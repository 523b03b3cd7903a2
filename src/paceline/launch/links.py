"""Measures the links between hosts: runs on each of them, with plain TCP sockets.

`python -m paceline.launch.links` is told what to do on its standard input, where nobody else sees
it, one line of JSON each, and answers with one line of JSON:

    {"secret": ..., "address": this host's own}            -> {"port": ...}
    {"do": "clock"}                                        -> {"time": seconds}
    {"do": "measure", "address": ..., "port": ..., "seconds": ...}
                                    -> {"megabits": ..., "round_trip_ms": ..., "from": address}
                                    or {"error": why}

The end of its input ends it. Only who proves to know the secret is answered.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import statistics
import struct
import sys
import threading
import time
from typing import Any

from paceline.schema.plain import checked, parse_json
from paceline.secure.addresses import listening_address
from paceline.secure.line import connect, prove
from paceline.secure.sealing import Sealing

PURPOSE = "links"
BLOCK = bytes(256 << 10)
ROUNDS = 21
_CONNECT_SECONDS = 5.0
_SILENCE_SECONDS = 20.0
_LATENCY_SECONDS = 1.0
STRANGER_SECONDS = 2.0
"""How long who has not proved anything can keep the others waiting."""
LONGEST_SECONDS = 60.0
_LONGEST_ANSWER = 4096
"""Bytes of what a receiver says it got: one number."""
_WARM = 0.25
"""Part of the time that is not counted: TCP begins slowly."""


def measure(address: str, port: int, secret: str, seconds: float) -> dict[str, Any]:
    """Round trip and throughput from here to another host's `serve`."""
    try:
        place = [(address, port)]
        connection, sealing = connect(place, secret, PURPOSE, seconds=_CONNECT_SECONDS)
        with connection:
            connection.settimeout(_SILENCE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own = str(connection.getsockname()[0])
            connection.sendall(sealing.seal(f"{seconds}".encode()))
            round_trip = _round_trip(connection)
            return {
                "megabits": _throughput(connection, seconds),
                "round_trip_ms": round_trip * 1e3,
                "from": own,
            }
    except (OSError, ValueError) as error:
        return {"error": str(getattr(error, "strerror", None) or error)}


def _round_trip(connection: socket.socket) -> float:
    """Median of small messages there and back; the first one warms the way up."""
    found: list[float] = []
    begin = time.perf_counter()
    for _ in range(ROUNDS + 1):
        sent = time.perf_counter()
        connection.sendall(b"p")
        if connection.recv(1) != b"p":
            raise ConnectionError("the other side hung up")
        found.append(time.perf_counter() - sent)
        if sent - begin > _LATENCY_SECONDS:
            break
    return statistics.median(found[1:] or found)


def _throughput(connection: socket.socket, seconds: float) -> float:
    """Send until the receiver says what it got: what is only buffered does not count."""
    connection.sendall(b"s")
    connection.setblocking(False)
    deadline = time.monotonic() + seconds + _SILENCE_SECONDS
    answer = b""
    while not answer.endswith(b"\n"):
        if time.monotonic() > deadline:
            raise ConnectionError(f"no answer within {seconds + _SILENCE_SECONDS:.0f} s")
        readable, writable, _ = select.select([connection], [connection], [], 1.0)
        if readable:
            data = connection.recv(4096)
            if not data:
                raise ConnectionError("the other side hung up")
            answer += data
            if len(answer) > _LONGEST_ANSWER:
                raise ConnectionError("the other side answers without an end")
        elif writable:
            with contextlib.suppress(BlockingIOError):
                connection.send(BLOCK)
    # Closing this way drops what is still buffered: minutes, on a slow link.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return float(checked(parse_json(answer), {"megabits": float})["megabits"])


def serve(listener: socket.socket, secret: str) -> None:
    """Answer one `measure` after the other, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        # Whatever one caller does ends its own connection alone.
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(STRANGER_SECONDS)
            sealing = Sealing(secret, PURPOSE, asks=False)
            prove(connection, sealing)
            connection.settimeout(_SILENCE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _answer(connection, sealing)


def _answer(connection: socket.socket, sealing: Sealing) -> None:
    orders: list[bytes] = []
    while not orders:
        data = connection.recv(1)  # byte by byte: what follows the order is not sealed
        if not data:
            return
        orders = sealing.feed(data)
    seconds = read_seconds(orders[0])
    while (word := connection.recv(1)) == b"p":
        connection.sendall(b"p")
    if word == b"s":
        megabits = _receive(connection, seconds)
        connection.sendall(json.dumps({"megabits": megabits}).encode() + b"\n")
        while connection.recv(1 << 20):
            pass


def read_seconds(text: bytes) -> float:
    """How long to measure; ValueError for anything but a short time."""
    seconds = float(text)
    if not 0.0 < seconds <= LONGEST_SECONDS:
        raise ValueError(f"{seconds} s is no time to measure")
    return seconds


def _receive(connection: socket.socket, seconds: float) -> float:
    """Megabits per second, counted from the end of the warm-up."""
    buffer = bytearray(1 << 20)
    begin = counted_from = time.perf_counter()
    total = 0
    now = begin
    while now - begin < seconds:
        count = connection.recv_into(buffer)
        if not count:
            raise ConnectionError("the sender hung up")
        now = time.perf_counter()
        if now - begin < seconds * _WARM:
            counted_from = now
        else:
            total += count
    return total * 8 / 1e6 / max(now - counted_from, 1e-9)


def main() -> int:
    """Do what the launcher says; see the module's own words."""
    first = parse_json(sys.stdin.readline() or "{}")
    if not first:
        return 1
    secret = str(first["secret"])
    listener = socket.create_server((listening_address(first["address"]), 0), backlog=16)
    threading.Thread(target=serve, args=(listener, secret), daemon=True).start()
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    for line in sys.stdin:
        order = parse_json(line)
        if order["do"] == "clock":
            answer: dict[str, Any] = {"time": time.time()}
        else:
            answer = measure(order["address"], order["port"], secret, order["seconds"])
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
