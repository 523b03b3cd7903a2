"""Figures as people read them."""

from __future__ import annotations

import contextlib
import os
import stat


def duration(seconds: float) -> str:
    """Short and readable.

    >>> duration(75), duration(4.25), duration(7300)
    ('1 min 15 s', '4.2 s', '2 h 1 min')
    >>> duration(59.99), duration(119.7)
    ('1 min 0 s', '2 min 0 s')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def rate(images_per_second: float) -> str:
    """Images per second with three digits at least: large models train at a few.

    >>> rate(1.954), rate(68.31), rate(14321.4), rate(0)
    ('1.95', '68.3', '14,321', '0.00')
    """
    digits = 2 if images_per_second < 9.995 else 1 if images_per_second < 99.95 else 0
    return f"{images_per_second:,.{digits}f}"


def rank_name(rank: int, host: str, role: str = "worker") -> str:
    """A rank as people call it.

    >>> rank_name(0, "a"), rank_name(3, "d", "server")
    ('rank 0 on a', 'server, rank 3 on d')
    """
    return f"{'server, ' if role == 'server' else ''}rank {rank} on {host}"


def leave_terminal() -> None:
    """Write to a terminal that has gone no more: every line would raise an error instead."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)
