"""A launcher's `Control` that takes its turns on a thread, as a session does, for tests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from paceline.launch.control import Control, Lost


@contextlib.contextmanager
def attended(
    lost: list[int] | None = None, *, lost_ones: list[Lost] | None = None
) -> Iterator[Control]:
    """A control of one node; whom it loses is added to `lost`. It must still turn at the end."""
    control = Control(1)
    ended = threading.Event()
    failures: list[BaseException] = []

    def turn() -> None:
        try:
            while not ended.is_set():
                _, found = control.turn(0.02)
                if lost is not None:
                    lost.extend(each.node for each in found)
                if lost_ones is not None:
                    lost_ones.extend(found)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield control
    finally:
        ended.set()
        thread.join()
        control.close()
    assert not failures, failures


def wait_for(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
