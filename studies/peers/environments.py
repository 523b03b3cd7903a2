"""Where a peer's environment is, whether it is whole, and what is in it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.cache import kept
from paceline.config.environment import cache_root
from studies.peers.recipes import TORCH, Program, Recipe, recipe

RECORD = "installed.json"
"""Written last: an environment without it is what an interrupted install left."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What an install that came to its end wrote."""

    recipe: str
    """The recipe's fingerprint: an environment of another one is installed anew."""
    python: str
    packages: dict[str, str] = field(default_factory=dict)
    """Name and version of everything in it."""
    bytes: int
    seconds: float
    when: str


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer as it is here."""

    recipe: Recipe
    folder: Path
    record: Record | None
    """None: not installed, or not to its end."""
    outdated: bool
    """Installed by the recipe of another version of Paceline, or for another Python."""
    missing: tuple[Program, ...]

    @property
    def installed(self) -> bool:
        return self.record is not None and not self.outdated

    @property
    def ready(self) -> bool:
        """Whether it can train here."""
        return self.installed and not self.missing

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def remedy(self) -> str:
        """The line that makes it ready; nothing where it is."""
        if not self.installed:
            return install_line(self.recipe.name)
        return "; ".join(program.remedy for program in self.missing)


def install_line(name: str) -> str:
    """What installs a peer.

    >>> install_line("horovod")
    'paceline peers install horovod'
    """
    return f"paceline peers install {name}"


def peers_root() -> Path:
    """The folder of all environments."""
    return cache_root() / "peers"


def fingerprint(of: Recipe) -> str:
    """Changes with anything that changes what is installed."""
    content = asdict(of) | {"torch": TORCH}
    for aside in ("title", "minutes", "programs"):
        content.pop(aside)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def find_peer(name: str) -> Peer:
    """A peer as it is here."""
    of = recipe(name)
    folder = peers_root() / name
    record = kept(Record, folder / RECORD)
    if record is not None and not (folder / "bin" / "python").exists():
        record = None  # the Python that it was made of has gone
    return Peer(
        recipe=of,
        folder=folder,
        record=record,
        outdated=record is not None
        and (record.recipe, record.python) != (fingerprint(of), platform.python_version()),
        missing=missing(of.programs),
    )


def missing(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Those that are not on the PATH."""
    return tuple(program for program in programs if shutil.which(program.name) is None)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            total += os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118
    return total


def _version(record: Record, package: str) -> str | None:
    """Of a package, whichever way pip spells it: tensorflow_cpu is tensorflow-cpu."""
    found = {name.lower().replace("_", "-"): value for name, value in record.packages.items()}
    return found.get(package)


def facts(peer: Peer) -> dict[str, Any]:
    """What `paceline peers` tells of one, as JSON-able values."""
    record = peer.record
    return {
        "name": peer.recipe.name,
        "title": peer.recipe.title,
        "installed": peer.installed,
        "outdated": peer.outdated,
        "ready": peer.ready,
        "version": _version(record, peer.recipe.package) if record else None,
        "wanted": peer.recipe.version,
        "torch": record.packages.get("torch") if record else None,
        "bytes": record.bytes if record else None,
        "missing": [program.name for program in peer.missing],
        "remedy": peer.remedy,
        "folder": str(peer.folder),
    }
