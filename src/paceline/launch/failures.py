"""What went wrong on hosts, in words, and which of several reports is the cause."""

from __future__ import annotations

from typing import Any, NoReturn

from paceline import errors
from paceline.errors import WorkerError
from paceline.launch.channel import Message
from paceline.launch.control import Lost

_CONSEQUENCES = ("another rank failed", "lost another host", "which leads the training, has gone")


def order(failure: Message | Lost) -> int:
    """Causes first: what a rank says of itself, a lost host, an end without a word, hearsay."""
    if isinstance(failure, Lost):
        return 1
    report = failure["report"]
    if report.get("wordless"):  # MPI, too, ends ranks without a word when another host is lost
        return 2
    late = report["kind"] == "DeadlineError"
    return 3 if late or any(text in str(report["message"]) for text in _CONSEQUENCES) else 0


def lost_sentence(lost: Lost, host: str, rank: int, place: str) -> str:
    """Who was lost, what it was doing, and the likely cause."""
    if lost.fault:
        how = f"was let go: it sent what no agent of this version sends ({lost.fault})"
        why = "install the same version on all hosts"
    elif lost.silent_seconds is None:
        how = "has gone: its connection was closed"
        why = "it was shut down, or its processes were killed"
    else:
        how = f"has not been heard of for {lost.silent_seconds:.0f} s"
        why = "it or its link is down, or it is stopped"
    return f"host {host} (rank {rank}) {how} in {place}: {why}"


def report_sentence(report: dict[str, Any], host: str) -> str:
    """What a node's process has left word of, in one line, with its place."""
    text = str(report["message"]).strip().partition("\n")[0]
    return _with_place(text, host, report["rank"])


def raise_report(report: dict[str, Any], host: str) -> NoReturn:
    """Raise what a node's process has left word of."""
    kind = getattr(errors, str(report["kind"]), None)
    message = str(report["message"])
    if report["expected"] and isinstance(kind, type) and issubclass(kind, errors.PacelineError):
        raise kind(_with_place(message, host, report["rank"]))
    trace = str(report.get("traceback", "")).rstrip()
    raise WorkerError(
        f"rank {report['rank']} on host {host} failed with {report['kind']}: {message}"
        + (f"\n{trace}" if trace else "")
    )


def _with_place(message: str, host: str, rank: int) -> str:
    """A rank's own sentence, with its host where it does not say so itself."""
    if f"host {host}" in message or f" on {host} " in message:
        return message
    if message.startswith("rank "):
        return f"host {host}: {message}"
    joint = " " if message.startswith(("was killed", "exited with")) else ": "
    return f"rank {rank} on host {host}{joint}{message}"
