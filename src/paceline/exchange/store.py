"""The store where nodes find each other: torch's interface, over sealed connections.

torch's own TCPStore asks nobody who he is: whoever reaches its port reads and writes it. This one
is served by a thread of the first node to those who know the run's secret. It holds addresses of
connections, counters and small notes; no code, no path and no configuration is taken from it.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store

from paceline.errors import shortened, shown
from paceline.schema.plain import ONE_LINE, checked, parse_json
from paceline.secure.addresses import listening_address
from paceline.secure.door import Door
from paceline.secure.line import Line, connect

PURPOSE = "store"
_SLACK_SECONDS = 10.0
"""How much later than its own deadline an answer may come: the first node may be busy."""
_ORDER = {
    "do": ONE_LINE, "keys": [str], "number?": int, "seconds?": float, "value?": str,
}  # fmt: skip
_ANSWER = {"number?": int, "value?": str, "error?": str}
_LOOK_SECONDS = 0.5
"""Between two looks at deadlines of those who wait."""


@dataclass(frozen=True, kw_only=True)
class StoreRequest:
    do: str
    keys: tuple[str, ...]
    value: bytes = b""
    number: int = 0
    seconds: float = 0.0

    def encoded(self) -> bytes:
        """As it travels."""
        plain: dict[str, Any] = {"do": self.do, "keys": self.keys, "number": self.number}
        plain["seconds"] = self.seconds
        plain["value"] = base64.b64encode(self.value).decode()
        return json.dumps(plain).encode()


def read_order(body: bytes) -> StoreRequest:
    """An order from its bytes, whose MAC was right; ValueError for anything else."""
    try:
        plain = checked(parse_json(body), _ORDER)
        if not plain["keys"]:
            raise ValueError("it names no key")
        value = base64.b64decode(plain.get("value") or "", validate=True)
    except ValueError as error:
        raise ValueError(f"no order: {error}") from None
    return StoreRequest(
        do=plain["do"],
        keys=tuple(plain["keys"]),
        value=value,
        number=plain.get("number") or 0,
        seconds=float(plain.get("seconds") or 0.0),
    )


def read_answer(body: bytes) -> dict[str, Any]:
    """The store's answer from its bytes; RuntimeError for one that cannot be used."""
    try:
        answer: dict[str, Any] = checked(parse_json(body), _ANSWER)
        if answer.get("value") is not None:
            answer["value"] = base64.b64decode(answer["value"], validate=True)
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"the store answers what cannot be used: {error}") from None
    if answer.get("error") is not None:
        raise RuntimeError(shortened(answer["error"]))
    return answer


@dataclass
class StoreTable:
    """What the store holds, and its answers; no I/O."""

    values: dict[str, bytes] = field(default_factory=dict)

    def answer(self, order: StoreRequest) -> dict[str, Any] | None:
        """The answer; None while a key that is waited for is missing."""
        first = order.keys[0]
        if order.do == "set":
            self.values[first] = order.value
        elif order.do == "add":
            try:
                total = int(self.values.get(first, b"0")) + order.number
            except ValueError:
                return {"error": f"{first} is no counter"}
            self.values[first] = str(total).encode()
            return {"number": total}
        elif order.do == "check":
            return {"number": int(all(key in self.values for key in order.keys))}
        elif order.do in ("get", "wait"):
            if not all(key in self.values for key in order.keys):
                return None
            if order.do == "get":
                return {"value": base64.b64encode(self.values[first]).decode()}
        elif order.do == "delete":
            return {"number": int(self.values.pop(first, None) is not None)}
        else:
            return {"error": f"the store has no order {shown(order.do)}"}
        return {}


class StoreServer:
    """Serves a table on a thread of its own until it is closed."""

    def __init__(self, address: str, port: int, secret: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._door = Door(secret, PURPOSE, self._selector, Line)
        self.port = self._door.listen(address, port)
        if port and self.port != port:
            self._door.close()
            raise RuntimeError(f"port {port} of {address or 'this host'} is taken")
        self._table = StoreTable()
        self._lines: set[Line] = set()
        self._waiting: dict[Line, tuple[StoreRequest, float]] = {}
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="paceline-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _serve(self) -> None:
        try:
            while True:
                for key, mask in self._selector.select(_LOOK_SECONDS):
                    if key.data is None:
                        return
                    self._attend(key, mask)
                self._door.look()
                self._look()
        finally:
            self._door.close()
            for line in self._lines:
                line.close()
            self._selector.close()
            self._wake.close()
            self._woken.close()

    def _attend(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.data is self._door:
            known = self._door.attend(key.fileobj)
            if known is not None:
                self._lines.add(known)
                self._selector.register(known, selectors.EVENT_READ, known)
            return
        line: Line = key.data
        if line not in self._lines:
            return
        if mask & selectors.EVENT_WRITE:
            line.flush()
        bodies, is_open = line.receive_bytes()
        try:
            for body in bodies:
                order = read_order(body)
                self._waiting[line] = (order, time.monotonic() + order.seconds)
        except ValueError:
            is_open = False
        self._answer_all()
        if not is_open:
            self._lines.discard(line)
            self._waiting.pop(line, None)
            self._selector.unregister(line)
            line.close()

    def _answer_all(self) -> None:
        """Answer who can be: one answer may be what another waits for."""
        changed = True
        while changed:
            changed = False
            for line, (order, _) in list(self._waiting.items()):
                answer = self._table.answer(order)
                if answer is not None:
                    del self._waiting[line]
                    self._tell(line, answer)
                    changed = True

    def _look(self) -> None:
        now = time.monotonic()
        for line, (order, deadline) in list(self._waiting.items()):
            if now > deadline:
                del self._waiting[line]
                names = ", ".join(key for key in order.keys if key not in self._table.values)
                self._tell(line, {"error": f"timed out waiting for {names} in the store"})

    def _tell(self, line: Line, answer: dict[str, Any]) -> None:
        line.send_bytes(json.dumps(answer).encode())
        waiting = selectors.EVENT_WRITE if line.is_waiting else 0
        self._selector.modify(line, selectors.EVENT_READ | waiting, line)


class SecureStore(Store):
    """One process's connection to the store; RuntimeError when it is lost or waits too long."""

    def __init__(
        self, address: str, port: int, secret: str, *, seconds: float, serves: bool = False
    ) -> None:
        """`serves`: this process has the store, at this address of its own."""
        super().__init__()
        self._seconds, self._secret = seconds, secret
        self.hopeless: Callable[[], str] | None = None
        """Says why there is no use in waiting any longer, if there is none."""
        self._lock = threading.Lock()
        self._line: Line | None = None
        self._server = StoreServer(listening_address(address), port, secret) if serves else None
        self.place = (address, self._server.port if self._server else port)
        try:
            self._line = Line(*connect([self.place], secret, PURPOSE, patience=seconds))
        except ConnectionError as error:
            self.close()
            raise RuntimeError(f"the store cannot be reached at {error}") from None

    def close(self) -> None:
        """Leave the store; whoever has it closes it."""
        line, self._line = self._line, None
        if line is not None:
            line.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _ask(self, order: StoreRequest) -> dict[str, Any]:
        with self._lock:
            line = self._line
            if line is None:
                raise RuntimeError("the connection to the store is closed")
            line.send_bytes(order.encoded())
            end = time.monotonic() + order.seconds + max(self._seconds, _SLACK_SECONDS)
            while time.monotonic() < end:
                line.wait(_LOOK_SECONDS)
                bodies, is_open = line.receive_bytes()
                if bodies:
                    return read_answer(bodies[0])
                if not is_open:
                    self._leave(line)
                    raise RuntimeError("the connection to the store was lost")
                if order.seconds and self.hopeless is not None and (why := self.hopeless()):
                    self._leave(line)  # and its answer, should there be one, with it
                    self._line = Line(*connect([self.place], self._secret, PURPOSE))
                    raise RuntimeError(f"waiting at the store was given up: {why}")
            self._leave(line)  # an answer that comes later would be taken for the next one's
            raise RuntimeError("timed out waiting for the store")

    def _leave(self, line: Line) -> None:
        self._line = None
        line.close()

    # --- torch's interface --------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask(StoreRequest(do="set", keys=(key,), value=data))

    def get(self, key: str) -> bytes:
        answer = self._ask(StoreRequest(do="get", keys=(key,), seconds=self._seconds))
        return bytes(answer["value"])

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(StoreRequest(do="add", keys=(key,), number=int(amount)))["number"])

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(StoreRequest(do="check", keys=tuple(keys)))["number"])

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        self._ask(StoreRequest(do="wait", keys=tuple(keys), seconds=seconds))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(StoreRequest(do="delete", keys=(key,)))["number"])

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._seconds = timeout.total_seconds()
