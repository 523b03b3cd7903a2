"""One end of a control connection: sealed JSON messages over TCP, never blocking, never pickled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.secure import line
from paceline.secure.line import CHUNK, Line

Message = dict[str, Any]

PURPOSE = "control"
BEAT_SECONDS = 0.5
"""How often each side shows that it lives."""
SILENCE_SECONDS = 6.0
"""An agent that was not heard of for so long is lost."""
MOST_WAITING = 2**20
"""Bytes in the queue above which beats and printed lines are left out: the other side is stuck."""

__all__ = ["BEAT_SECONDS", "CHUNK", "SILENCE_SECONDS", "Channel", "Message", "connect"]


class Channel(Line):
    """Sends and receives messages over a connected socket."""

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
                messages.append(read_message(body))
            except ValueError:
                return messages, False  # no one of ours
        return messages, is_open


def read_message(body: bytes) -> Message:
    """A message from its bytes, whose MAC was right; ValueError for anything else."""
    try:
        message = json.loads(body)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("a message must be an object with a kind")
    return message


def connect(addresses: Sequence[tuple[str, int]], secret: str) -> Channel:
    """A channel to the launcher, at the first of several addresses that answers."""
    try:
        return Channel(*line.connect(addresses, secret, PURPOSE))
    except ConnectionError as error:
        raise ConnectionError(
            f"the launcher cannot be reached at {error}: it has ended, a firewall stands between,"
            " or it is another run's"
        ) from None
