"""Orders of the node that leads a training in legs to the others, and their answers.

They go over the store where nodes meet, not over the network that carries gradients: a node that
has nothing to do sleeps until an order comes, and what breaks a leg's connections leaves these.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from paceline.errors import DeadlineError, LostError, WorkerError
from paceline.exchange.store import SecureStore
from paceline.schema.plain import ONE_LINE, checked, parse_json

_LOOK_SECONDS = 0.05
"""Between two looks whether an answer has come, or whoever owes it has gone."""
_KEPT = 64
"""Orders that stay in the store for nodes that have not read them yet."""
_ORDER = {"do": ONE_LINE, "members": [int], "words": {}}
_WELCOME = {"number": int, "hosts": [ONE_LINE]}
_ARRIVALS = "arrivals"
"""Set while a node that came later waits to be taken in."""
_ANSWER = {"did?": {}, "refused?": str, "kind?": ONE_LINE}


class Crew:
    """All nodes of a training, seen from one of them; the first one leads."""

    def __init__(self, store: SecureStore, node: int, hosts: list[str]) -> None:
        self._store, self.node, self.hosts = store, node, hosts
        self._number = 0
        self.gone: dict[int, str] = {}
        """Nodes that were lost, and how; filled in by whoever hears of it."""
        self._comings: dict[int, int] = {}
        """How often a node has come while the others trained."""

    # --- the node that leads --------------------------------------------------

    def order(self, do: str, nodes: Iterable[int], **words: Any) -> None:
        """Tell these nodes what to do next."""
        self._number += 1
        text = json.dumps({"do": do, "members": list(nodes), "words": words})
        with _explained("tell the other nodes what to do"):
            self._store.set(f"order/{self._number}", text)
            self._store.delete_key(f"order/{self._number - _KEPT}")

    def answer_of(self, node: int, seconds: float | None) -> dict[str, Any]:
        """What a node has made of the newest order; waits for it, without end where None."""
        key = f"answer/{self._number}/{node}"
        end = None if seconds is None else time.monotonic() + seconds
        pause = 0.001
        while not self.has_answered(node):
            if node in self.gone:
                raise LostError(self.gone[node])
            if end is not None and time.monotonic() > end:
                raise DeadlineError(
                    f"{self.hosts[node]} did not answer within {seconds:.0f} s: it hangs, is"
                    " cut off, or is far slower; raise train.deadline if it only needs time"
                ) from None
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_SECONDS)
        with _explained("hear the other nodes"):
            text = self._store.get(key)
            self._store.delete_key(key)
        return read_answer(text, self.hosts[node])

    def has_answered(self, node: int) -> bool:
        """Whether a node has made something of the newest order."""
        with _explained("hear the other nodes"):
            return self._store.check([f"answer/{self._number}/{node}"])

    def said_by(self, node: int, what: str) -> float | None:
        """The number that a node has said of itself by itself; None while it has not."""
        key = f"said/{what}/{node}"
        with _explained("hear the other nodes"):
            text = self._store.get(key) if self._store.check([key]) else None
        return None if text is None else read_number(text, self.hosts[node], what)

    def ask_to_stop(self) -> None:
        """Ask the nodes of a leg that this node has no part in to stop."""
        with _explained("tell the other nodes to stop"):
            self._store.set("stop", "1")

    def has_arrivals(self) -> bool:
        """Whether a node that came later waits to be taken in."""
        with _explained("hear the other nodes"):
            return self._store.check([_ARRIVALS])

    def arrivals(self) -> dict[int, Any]:
        """Nodes that wait to be taken in, the next new number among them, and what they say."""
        found = {}
        with _explained("hear the other nodes"):
            self._store.delete_key(_ARRIVALS)
            for node in range(1, len(self.hosts) + 1):
                if self._store.check([f"arrived/{node}"]):
                    found[node] = parse_json(self._store.get(f"arrived/{node}"))
                    self._store.delete_key(f"arrived/{node}")
        return found

    def take_in(self, node: int, host: str) -> None:
        """Count a node among the others from the next order on."""
        self.learn([{"node": node, "host": host, "comings": self._comings.get(node, 0) + 1}])
        text = json.dumps({"number": self._number, "hosts": self.hosts})
        with _explained("tell a node that it is taken in"):
            self._store.set(f"welcome/{node}", text)

    # --- the others -----------------------------------------------------------

    def arrive(self, words: dict[str, Any]) -> None:
        """Come to a training under way; returns when the first node has taken this one in."""
        with _explained("tell the first node that it is here"):
            self._store.delete_key(f"welcome/{self.node}")
            self._store.set(f"arrived/{self.node}", json.dumps(words))
            self._store.set(_ARRIVALS, "1")
        welcome = self._await(f"welcome/{self.node}", _WELCOME)
        self._number, self.hosts = int(welcome["number"]), list(welcome["hosts"])

    def known_of(self, nodes: Iterable[int]) -> list[dict[str, Any]]:
        """What other nodes may not have heard of these: they slept, or came later."""
        return [
            {"node": node, "host": self.hosts[node], "comings": self._comings.get(node, 0)}
            for node in nodes
        ]

    def learn(self, told: Iterable[Mapping[str, Any]]) -> None:
        """Hear what nodes are called, and who of those that were lost is there again."""
        for each in told:
            node = each["node"]
            self.hosts += ["?"] * (node + 1 - len(self.hosts))
            self.hosts[node] = each["host"]
            if each["comings"] > self._comings.get(node, 0):
                self._comings[node] = each["comings"]
                self.gone.pop(node, None)

    def say(self, what: str, value: Any) -> None:
        """Say something of this node that nobody waits for."""
        with _explained("tell the first node"):
            self._store.set(f"said/{what}/{self.node}", json.dumps(value))

    def on_stop(self, open_store: Callable[[], SecureStore], act: Callable[[], None]) -> None:
        """Act on a wish to stop, from a thread that sleeps until there is one."""

        def wait() -> None:
            # The end of the training closes the store.
            with contextlib.suppress(RuntimeError):
                store = open_store()
                while True:
                    try:
                        store.get("stop")
                        break
                    except RuntimeError as error:
                        if not _is_patience(error):
                            return
                act()

        threading.Thread(target=wait, name="paceline-stop", daemon=True).start()

    def next_order(self) -> dict[str, Any]:
        """The next order for this node; sleeps until it comes."""
        while True:
            self._number += 1
            order = self._await(f"order/{self._number}", _ORDER)
            if self.node in order["members"]:
                return order

    def _await(self, key: str, shape: Mapping[str, Any]) -> dict[str, Any]:
        while True:
            try:
                return read_order(self._store.get(key), shape)
            except RuntimeError as error:
                if not _is_patience(error):
                    raise WorkerError(
                        f"{self.hosts[0]}, which leads the training, has gone: {error}"
                    ) from error

    def answer(self, **words: Any) -> None:
        """Say what has come of the newest order."""
        with _explained("answer"):
            self._store.set(f"answer/{self._number}/{self.node}", json.dumps(words))

    def close(self) -> None:
        self._store.close()


def read_order(text: bytes, shape: Mapping[str, Any] = _ORDER) -> dict[str, Any]:
    """What the first node asks of others, or how it takes one in."""
    try:
        return dict(checked(parse_json(text), shape))
    except ValueError as error:
        raise WorkerError(f"what came is no order for a node: {error}") from None


def read_answer(text: bytes, host: str) -> dict[str, Any]:
    """What a node has made of an order."""
    try:
        return dict(checked(parse_json(text), _ANSWER))
    except ValueError as error:
        raise WorkerError(f"{host} answers what no node says: {error}") from None


def read_number(text: bytes, host: str, what: str) -> float:
    """What a node has said of itself."""
    try:
        return float(checked(parse_json(text), float))
    except ValueError as error:
        raise WorkerError(f"{host} says of its {what} what no node says: {error}") from None


def _is_patience(error: RuntimeError) -> bool:
    """Whether only nothing has come yet."""
    return str(error).startswith("timed out waiting for") and "in the store" in str(error)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise WorkerError(f"this node cannot {what}: {error}") from error
