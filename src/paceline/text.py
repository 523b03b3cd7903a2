"""Figures as people read them, and foreign texts as a terminal or a spreadsheet may have them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_STEERING = ("Cc", "Cs", "Zl", "Zp")
"""Kinds of characters that steer what shows them: escapes, half characters, ends of lines."""
_TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that turn the direction of writing, and so can hide what a text says."""
_NUMBER = re.compile(r"[+-]?[0-9][0-9.,]*(?:[eE][+-]?[0-9]+)?")


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


def clock(seconds: float) -> str:
    """As a clock shows it.

    >>> clock(75), clock(7300.4)
    ('1:15', '2:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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


def place_name(phase: str, update: int) -> str:
    """Where in a training somebody is.

    >>> place_name("update", 12), place_name("evaluate", 12), place_name("", 0)
    ('update 12', 'evaluate of update 12', 'start-up')
    """
    if phase == "update":
        return f"update {update}"
    return f"{phase or 'start-up'} of update {update}" if phase or update else "start-up"


def leave_terminal() -> None:
    """Write to a terminal that has gone no more: every line would raise an error instead."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)


def user_path(text: str | Path) -> Path:
    """A path as a person writes it: `~` is the home folder, `~name` another's where there is one.

    >>> user_path("~nobody-of-that-name/x")
    PosixPath('~nobody-of-that-name/x')
    """
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path's own raises for unknown names


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def printable(text: str) -> str:
    """A text of a file, a host or a data set as a terminal may have it: nothing in it steers.

    >>> print(printable("\\x1b[31mred"))
    \\x1b[31mred
    """
    if text.isascii() and text.isprintable():
        return text

    def steers(each: str) -> bool:
        return each in _TURNING or (each not in "\n\t" and unicodedata.category(each) in _STEERING)

    return "".join(ascii(each)[1:-1] if steers(each) else each for each in text)


def is_one_line(text: str) -> bool:
    """Whether a terminal may have a text as it is, in the middle of a line.

    >>> is_one_line("torch 2.13"), is_one_line("a\\nb"), is_one_line("\\x1b[31m")
    (True, False, False)
    """
    return (text.isascii() and text.isprintable()) or (
        "\n" not in text and "\t" not in text and printable(text) == text
    )


def spreadsheet_cell(cell: Any) -> Any:
    """A cell of a CSV file: what a spreadsheet would compute as a formula is marked as a text.

    >>> [spreadsheet_cell(cell) for cell in ("=1+1", "-0.5", "adam", -0.5)]
    ["'=1+1", '-0.5', 'adam', -0.5]
    """
    if not isinstance(cell, str) or _NUMBER.fullmatch(cell):
        return cell
    cell = printable(cell)
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r", "\\")) else cell


def is_number(text: str) -> bool:
    """Whether Python reads a number in it."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def how_it_ended(code: int) -> str:
    """A process that ended without a word, by its exit code.

    >>> how_it_ended(-9)
    'was killed by SIGKILL (often: out of memory)'
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # of a real-time signal
        name = f"signal {-code}"
    return f"was killed by {name}{' (often: out of memory)' if code == -signal.SIGKILL else ''}"


def terminal(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console that prints texts as they are: brackets are no markup, and nothing in them steers.

    `width`: where the output is no terminal.
    """
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    def made(**size: Any) -> Console:
        return Plain(stderr=stderr, markup=False, emoji=False, highlight=False, **size)

    console = made()
    return console if width is None or console.is_terminal else made(width=width)
