"""One command in a lab, with faults at their times and signals passed on."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from paceline.errors import PacelineError
from paceline.lab.cluster import Lab
from paceline.lab.network import Counters
from paceline.lab.process import LabProcess

__all__ = ["CommandOutcome", "run_session"]

GRACE_SECONDS = 10.0
TURN_SECONDS = 0.5
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOutcome:
    """How a command in a lab went."""

    exit_code: int
    """The command's own, or 128 and the number of the signal that ended it."""

    seconds: float
    """From its start to its end."""

    faults: tuple[dict[str, Any], ...]
    """Each fault that happened: when, what, and why not if it could not."""

    counters: dict[str, Counters]
    """Traffic of each host while it ran."""


def run_session(
    lab: Lab,
    command: Sequence[str],
    *,
    on: str | None = None,
    notify: Callable[[str], None] = print,
) -> CommandOutcome:
    """Run a command to its end while faults happen; `notify` gets one line for each."""
    before = lab.counters()
    waiting = sorted(lab.spec.faults, key=lambda fault: fault.seconds)
    happened: list[dict[str, Any]] = []
    started = time.monotonic()
    process = lab.start(command, on=on)
    with contextlib.closing(process), _signals_passed_on(process) as asked_to_end:
        while process.poll() is None:
            now = time.monotonic() - started
            if asked_to_end and time.monotonic() > asked_to_end[0] + GRACE_SECONDS:
                process.kill()
            while waiting and waiting[0].seconds <= now:
                fault = waiting.pop(0)
                record = {"seconds": round(now, 3), "kind": fault.kind, "host": fault.host}
                try:
                    lab.apply(fault)
                    notify(f"{now:.1f} s: {fault}")
                except PacelineError as error:
                    record["error"] = str(error)
                    notify(f"{now:.1f} s: {error}")
                happened.append(record)
            until = waiting[0].seconds - now if waiting else TURN_SECONDS
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, min(TURN_SECONDS, until)))
    seconds = time.monotonic() - started
    code = process.returncode
    assert code is not None, "the loop ends with the process"
    after = lab.counters()
    return CommandOutcome(
        exit_code=code if code >= 0 else 128 - code,
        seconds=seconds,
        faults=tuple(happened),
        counters={host: after[host] - before[host] for host in after},
    )


@contextlib.contextmanager
def _signals_passed_on(process: LabProcess) -> Iterator[list[float]]:
    """Pass Ctrl-C and the like to the command; a second one kills it."""
    asked: list[float] = []

    def forward(number: int, _: FrameType | None) -> None:
        process.send_signal(signal.SIGKILL if asked else number)
        asked.append(time.monotonic())

    old = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
