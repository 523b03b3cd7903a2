"""Ports for servers that a test starts later."""

from __future__ import annotations

import secrets
import socket

_FIRST, _LAST = 20000, 32000
"""Below what the kernel gives to those who connect: they could take it before its server does."""


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    while True:
        port = _FIRST + secrets.randbelow(_LAST - _FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
