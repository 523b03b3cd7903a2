"""The training's side of RUN/requests: wishes are taken while it runs, and none outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.errors import ConfigError
from paceline.run import RunDirectory, write_whole
from paceline.schema.requests import STOP, TAKES, wished_settings

LOOK_SECONDS = 0.5


class Requests:
    """Looks for wishes from a thread of its own, and stops the training as Ctrl-C would."""

    def __init__(self, run: RunDirectory, say: Callable[[str], None]) -> None:
        self.changes: dict[str, Any] = {}
        """Settings with which the training is to go on after it has stopped."""
        self._run, self._say = run, say
        self._closing = threading.Event()
        self._asked = False
        self._thread = threading.Thread(target=self._work, name="paceline-requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            # Before the loop listens to signals, one would end the process as it stands.
            if self._asked or not callable(signal.getsignal(signal.SIGTERM)):
                continue
            with contextlib.suppress(OSError):
                self._look()

    def _look(self) -> None:
        folder = self._run.requests
        if (folder / STOP).exists():
            self._say("asked to stop: saving")
            self._stop()
        elif (folder / "settings.json").exists():
            try:
                self.changes = wished_settings(self._run)
            except ConfigError as error:
                self._say(f"warning: {error}")
                (folder / "settings.json").unlink(missing_ok=True)
                return
            self._say(f"asked to change {shown_settings(self.changes)}: saving and going on")
            self._stop()

    def _stop(self) -> None:
        self._asked = True
        os.kill(os.getpid(), signal.SIGTERM)


def shown_settings(settings: dict[str, Any]) -> str:
    """Settings as they are written on a line."""
    return ", ".join(f"{key} = {'none' if v is None else v}" for key, v in settings.items())


@contextlib.contextmanager
def taking_requests(
    run: RunDirectory, takes: Sequence[str], say: Callable[[str], None]
) -> Iterator[Requests | None]:
    """Take wishes while inside; those of an earlier training are forgotten."""
    shutil.rmtree(run.requests, ignore_errors=True)
    if threading.current_thread() is not threading.main_thread() or not takes:
        yield None  # only the main thread hears signals
        return
    try:
        run.requests.mkdir()
        write_whole(run.requests / TAKES, json.dumps(list(takes)))
    except OSError:
        yield None  # a disk that takes no wishes is no reason not to train
        return
    found = Requests(run, say)
    try:
        yield found
    finally:
        found.close()
        shutil.rmtree(run.requests, ignore_errors=True)
