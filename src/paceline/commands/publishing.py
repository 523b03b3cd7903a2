"""`paceline train --publish`: a process beside the training that exports every new best."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.serve.versions import checked_name

LAST_SECONDS = 600.0
"""For the last export after the training is over: the largest models take minutes."""


def check(to: Path) -> None:
    """Refuse, before anything is trained, a place where nothing could be published."""
    from paceline.errors import ConfigError

    checked_name(to.name)
    if to.exists() and not to.is_dir():
        raise ConfigError(f"--publish {to} is a file: give a folder as models/NAME")


@contextlib.contextmanager
def publishing(run: Path, to: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """Publish the run's best weights, each as they come, until the training is over."""
    if to is None:
        yield
        return
    words = [sys.executable, "-m", "paceline.serve.publish", str(run), str(to), "onnx"]
    # A session of its own: Ctrl-C is for the training, which then lets this one finish.
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def tell(lines: Iterator[str]) -> None:
        for line in lines:
            say(line.rstrip())

    teller = threading.Thread(target=tell, args=(process.stdout,), daemon=True)
    teller.start()
    try:
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            say(
                f"warning: the last best was not published within {LAST_SECONDS:g} s: write it with"
                f" `paceline export {run} --to {to}`"
            )
        teller.join()
        process.stdout.close()
