"""Files that only their owner can read: where a run's secret lies while it runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from paceline.errors import ConfigError

MOST_CHARACTERS = 2**16
"""Of a secret, or of a note with one."""


def write_private(path: Path, text: str) -> None:
    """Write a new file with mode 0600 in place of whatever was there, links included."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def read_private(path: Path) -> str:
    """What the file says, if it is this user's own and nobody else can read or write it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, encoding="utf-8") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                f"{path} holds a secret and must be yours alone: chown it to you and chmod 600 it,"
                " or remove it"
            )
        try:
            return file.read(MOST_CHARACTERS)
        except UnicodeDecodeError:
            raise ConfigError(f"{path} holds no text: remove it") from None
