"""Where ranks leave word for each other outside of collectives: in the run directory or a store.

A post is a small piece of JSON by rank. Reading and writing never fail a run: what cannot be
written is not there, and who is not there is reported as giving no sign.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from paceline.schema import write_json
from paceline.schema.plain import ONE_LINE, checked, parse_json, read_text

FILE_NAME = "watch.json"
_WORD = {
    "host?": ONE_LINE, "time?": float,
    "state?": {
        "phase": ONE_LINE, "update": int, "seconds": float, "stack": str, "operation?": ONE_LINE,
    },
}  # fmt: skip


def read_word(text: str | bytes) -> dict[str, Any]:
    """What a rank has said; ValueError for what no rank says."""
    return dict(checked(parse_json(text), _WORD))


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
            return read_word(read_text(self._path(rank)))
        except (OSError, ValueError):
            return None


class Store(Protocol):
    """The part of `torch.distributed`'s stores that is used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class StorePosts:
    """In a key-value store that all hosts reach, such as torch's TCPStore.

    A store may hang for ever, and does so just when there is something to say: when the network
    is cut. So a thread of its own talks to it, and who asks waits for `patience` seconds at most.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        prefix: str = "paceline/watch",
        patience: float = 1.0,
    ) -> None:
        """`open_store` gives a connection that nobody else uses; the thread calls it."""
        self._open, self._prefix, self._patience = open_store, prefix, patience
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._busy: _Order | None = None
        self._thread = threading.Thread(target=self._work, name="paceline-posts", daemon=True)
        self._thread.start()

    def post(self, rank: int, word: dict[str, Any]) -> None:
        self._give(_Order(rank, json.dumps(word)))

    def read(self, rank: int) -> dict[str, Any] | None:
        order = self._give(_Order(rank))
        if not order.done.wait(0.0 if self._hangs() else self._patience) or order.answer is None:
            return None
        try:
            return read_word(order.answer)
        except ValueError:
            return None

    def close(self) -> None:
        """Leave the store, unless it hangs: the thread then ends with the process."""
        self._orders.put(None)
        self._thread.join(self._patience)

    def _give(self, order: _Order) -> _Order:
        if not self._hangs():  # what waits behind an order that hangs would be old news
            self._orders.put(order)
        return order

    def _hangs(self) -> bool:
        busy = self._busy
        return busy is not None and time.monotonic() - busy.begun > self._patience

    # --- the thread that talks to the store -----------------------------------

    def _work(self) -> None:
        store: Store | None = None
        while (order := self._orders.get()) is not None:
            order.begun = time.monotonic()
            self._busy = order
            # A store that is gone raises kinds of errors of its own.
            with contextlib.suppress(Exception):
                store = store or self._open()
                self._carry_out(store, order)
            self._busy = None
            order.done.set()

    def _carry_out(self, store: Store, order: _Order) -> None:
        key = f"{self._prefix}/{order.rank}"
        if order.text is not None:
            store.set(key, order.text)
        elif store.check([key]):
            order.answer = store.get(key)


class _Order:
    """Something to write into the store, or to read from it."""

    def __init__(self, rank: int, text: str | None = None) -> None:
        self.rank, self.text = rank, text
        self.answer: bytes | None = None
        self.done = threading.Event()
        self.begun = 0.0


class BothPosts:
    """In the run directory and in a store: one is enough to be heard.

    Hosts need not share a run directory, and a store is out of reach where the network is cut.
    """

    def __init__(self, *places: Posts) -> None:
        self._places = places

    def post(self, rank: int, word: dict[str, Any]) -> None:
        for place in self._places:
            place.post(rank, word)

    def read(self, rank: int) -> dict[str, Any] | None:
        """What a rank said last, wherever it came through: both times are of its own clock."""
        words = [word for place in self._places if (word := place.read(rank)) is not None]
        return max(words, key=lambda word: float(word.get("time") or 0.0), default=None)
