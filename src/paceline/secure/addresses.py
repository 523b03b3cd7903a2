"""Which addresses are this machine's own."""

from __future__ import annotations

import contextlib
import socket

LOOPBACK = "127.0.0.1"


def own_addresses() -> list[str]:
    """All of this machine's IPv4 addresses, those that others can reach first."""
    import psutil

    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    return sorted(dict.fromkeys(found), key=is_loopback) or [LOOPBACK]


def is_loopback(address: str) -> bool:
    """Whether only this machine itself reaches the address."""
    return address == "localhost" or address.startswith("127.")


def resolved(address: str) -> set[str]:
    """The IPv4 addresses of a name; empty where nobody knows it."""
    with contextlib.suppress(OSError, UnicodeError):
        return {str(entry[4][0]) for entry in socket.getaddrinfo(address, None, socket.AF_INET)}
    return set()


def listening_address(address: str) -> str:
    """Where to listen so that others reach `address`: there alone, where it is this host's own.

    Some systems give a host's own name a loopback address that others do not see: then anywhere.
    """
    found = resolved(address)
    if is_loopback(address):
        return min(found, default=LOOPBACK)
    outside = sorted(ip for ip in found & set(own_addresses()) if not is_loopback(ip))
    return outside[0] if outside else ""
