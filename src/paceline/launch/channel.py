"""One end of a control connection: sealed JSON messages over TCP, never blocking, never pickled.

What each message must hold stands in two tables, one for each direction. Whatever does not fit
ends the connection: handlers find the fields they ask for, of the types they expect.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.schema.plain import ONE_LINE, checked, parse_json
from paceline.secure import line
from paceline.secure.line import CHUNK, Line
from paceline.secure.sealing import Sealing

Message = dict[str, Any]

PURPOSE = "control"
BEAT_SECONDS = 0.5
"""How often each side shows that it lives."""
SILENCE_SECONDS = 6.0
"""An agent that was not heard of for so long is lost, unless a training says otherwise."""
SLACK_SECONDS = 4.0
"""How much longer the kernel keeps a connection: the launcher is to decide, not the kernel."""
MOST_WAITING = 2**20
"""Bytes in the queue above which beats and printed lines are left out: the other side is stuck."""

REPORT: Final = {
    "rank": int, "kind": ONE_LINE, "message": str, "expected": bool, "traceback?": str,
    "wordless?": bool, "told?": bool,
}  # fmt: skip
"""What a rank that failed says of itself, here and in error.json."""
TO_LAUNCHER: Final[Mapping[str, Mapping[str, Any]]] = {
    "hello": {"node": int, "host?": ONE_LINE, "cores?": [int]},
    "join": {"host": {"name": ONE_LINE}},
    "beat": {"ranks": [{"rank": int, "phase": str, "update": int}]},
    "patience": {"seconds": {"*": float}},
    "line": {"rank": int, "text": str, "error?": bool},
    "ready": {
        "shared": bool, "cores": [int], "usable": int, "folder": str,
        "kept?": {"folder": str, "update": int},
    },
    "measure": {"measure": {}},
    "links": {"links": {}},
    "port": {"port": int},
    "end": {"code": int},
    "error": {"report": REPORT},
    "brought": {"complete": bool},
}  # fmt: skip
TO_AGENT: Final[Mapping[str, Mapping[str, Any]]] = {
    "answer": {"joined": bool, "text": str},
    "welcome": {
        "run": str, "marker": ONE_LINE, "identity": ONE_LINE, "config": str,
        "folder": str, "variables": {"*": str}, "slots": int, "slot": int, "cores?": int,
        "silence": float,
    },
    "carried": {"taken": bool},
    "bring": {"folder": str},
    "forget": {"update": int},
    "measure": {"again": bool},
    "links": {
        "names": [ONE_LINE], "address": ONE_LINE, "port": int, "backend": ONE_LINE,
        "secret": ONE_LINE,
    },
    "start": {
        "plan": {}, "address": ONE_LINE, "port": int, "backend": ONE_LINE, "secret": ONE_LINE,
        "program": ONE_LINE, "silent": bool, "joins?": bool, "legs?": {},
    },
    "stop": {"signal": int},
    "stack": {},
    "lost": {"lost": int, "why?": str},
}  # fmt: skip

__all__ = ["BEAT_SECONDS", "CHUNK", "SILENCE_SECONDS", "Channel", "Message", "connect"]


class Channel(Line):
    """Sends and receives messages over a connected socket."""

    def __init__(
        self,
        connection: socket.socket,
        sealing: Sealing,
        fields: Mapping[str, Mapping[str, Any]] = TO_LAUNCHER,
    ) -> None:
        """`fields`: what messages to this end must hold, by kind."""
        super().__init__(connection, sealing)
        self._fields = fields
        self.fault = ""
        """What is wrong with the message that ended the connection."""

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message and send what goes without waiting."""
        if kind in ("beat", "line") and len(self._outgoing) > MOST_WAITING:
            return
        self.send_bytes(json.dumps({"kind": kind, **fields}).encode())

    def receive(self) -> tuple[list[Message], bool]:
        """Messages that have arrived, and whether the connection is still open."""
        bodies, is_open = self.receive_bytes()
        messages: list[Message] = []
        for body in bodies:
            try:
                messages.append(read_message(body, self._fields))
            except ValueError as error:
                self.fault = str(error)
                return messages, False
        return messages, is_open


def read_message(body: bytes, fields: Mapping[str, Mapping[str, Any]] = TO_LAUNCHER) -> Message:
    """A message from its bytes, whose MAC was right; ValueError for anything else."""
    message: Message = checked(parse_json(body), {"kind": ONE_LINE}, "a message")
    return dict(checked(message, fields.get(message["kind"], {}), f"`{message['kind']}`"))


def connect(addresses: Sequence[tuple[str, int]], secret: str) -> Channel:
    """A channel to the launcher, at the first of several addresses that answers."""
    try:
        return Channel(*line.connect(addresses, secret, PURPOSE), TO_AGENT)
    except ConnectionError as error:
        raise ConnectionError(
            f"the launcher cannot be reached at {error}: it has ended, a firewall stands between,"
            " or it is another run's"
        ) from None
