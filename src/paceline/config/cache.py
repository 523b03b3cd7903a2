"""What earlier commands found out, kept in the cache as JSON: one file per kind and key."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

from paceline.config.environment import cache_root
from paceline.errors import PacelineError
from paceline.schema import read_json, write_json

T = TypeVar("T")


def key_of(facts: Any) -> str:
    """The same for the same plain data."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def place_of(kind: str, key: str) -> Path:
    return cache_root() / kind / f"{key}.json"


def kept(cls: type[T], place: Path) -> T | None:
    """An entry; None where there is none, or it is damaged or another version's: find out anew."""
    try:
        return read_json(cls, place)
    except (OSError, PacelineError):
        return None


def keep(place: Path, value: Any) -> str:
    """Write an entry; what to say where that is impossible, which costs the next command time."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, value)
    except OSError as error:
        return f"nothing could be kept in {place.parent}: {error.strerror}"
    return ""
