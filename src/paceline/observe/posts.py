"""Where ranks leave word for each other outside of collectives: in the run directory or a store.

A post is a small piece of JSON by rank. Reading and writing never fail a run: what cannot be
written is not there, and who is not there is reported as giving no sign.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Protocol

from paceline.schema import write_json

FILE_NAME = "watch.json"


class Posts(Protocol):
    """What the stall watch needs."""

    def post(self, rank: int, word: dict[str, Any]) -> None:
        """Leave word, in place of what this rank said before."""

    def read(self, rank: int) -> dict[str, Any] | None:
        """What a rank said last."""


class FolderPosts:
    """In the ranks' folders of a run directory that all ranks see."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def _path(self, rank: int) -> Path:
        return self._run / f"rank-{rank}" / FILE_NAME

    def post(self, rank: int, word: dict[str, Any]) -> None:
        path = self._path(rank)
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            write_json(path, word)

    def read(self, rank: int) -> dict[str, Any] | None:
        try:
            word = json.loads(self._path(rank).read_text())
        except (OSError, ValueError):
            return None
        return word if isinstance(word, dict) else None


class Store(Protocol):
    """The part of `torch.distributed`'s stores that is used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class StorePosts:
    """In a key-value store that all hosts reach, such as torch's TCPStore.

    Give it a connection of its own with a short timeout (`store.clone()`): the one that
    collectives use may be blocked just when something is to be said.
    """

    def __init__(self, store: Store, prefix: str = "paceline/watch") -> None:
        self._store, self._prefix = store, prefix

    def post(self, rank: int, word: dict[str, Any]) -> None:
        # A store that is gone raises kinds of errors of its own.
        with contextlib.suppress(Exception):
            self._store.set(f"{self._prefix}/{rank}", json.dumps(word))

    def read(self, rank: int) -> dict[str, Any] | None:
        key = f"{self._prefix}/{rank}"
        try:
            word = json.loads(self._store.get(key)) if self._store.check([key]) else None
        except Exception:  # as above
            return None
        return word if isinstance(word, dict) else None
