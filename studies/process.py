"""A step's process: it ends with the experiment, however that ends; and the locks around it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from paceline.errors import RunDirectoryError, UserError

GRACE_SECONDS = 30.0
"""How long a step that is to end may take to save and clear up."""
TICK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def execute(
    command: Sequence[str],
    *,
    output: Path,
    printed: Path | None,
    keep: int,
    limit: float,
    environment: Mapping[str, str] | None,
    tick: Callable[[], None] = lambda: None,
) -> int:
    """Run a command to its end, or to its limit; whatever ends us ends it, too.

    What it says is added to `output`, its standard output goes to `printed` where that is given;
    the descriptor `keep` stays open in it; `tick` is called about once a second.
    """
    with contextlib.ExitStack() as stack:
        said: IO[bytes] = stack.enter_context(output.open("ab"))
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said if printed is None else stack.enter_context(printed.open("wb")),
            stderr=said,
            start_new_session=True,
            pass_fds=(keep,),
            env=environment,
            preexec_fn=_end_with_parent,
        )
        end = time.monotonic() + limit if limit else math.inf
        try:
            while time.monotonic() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(min(TICK_SECONDS, end - time.monotonic()))
                tick()
            _stop(process, signal.SIGTERM)
            return process.returncode
        except BaseException:
            _stop(process, signal.SIGINT)
            raise


def _end_with_parent() -> None:
    """A step must not go on when the experiment was killed, however hard."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _stop(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    process.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep a second run of the same experiment out of its folder."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): give another --out") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunDirectoryError(
                f"{out} is in use by another experiment: wait for it or give another --out"
            ) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def step_lock(folder: Path) -> Iterator[int]:
    """A lock that the step's own process holds, too: one that outlived us is waited for."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        patience = time.monotonic() + 2 * GRACE_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > patience:
                    raise RunDirectoryError(
                        f"{folder} is still in use by a process of an earlier try: end it"
                    ) from None
                time.sleep(0.2)
        yield descriptor
    finally:
        os.close(descriptor)
