"""What went wrong on hosts, in words, and which of several reports is the cause."""

from __future__ import annotations

from typing import Any, NoReturn

from paceline import errors
from paceline.errors import WorkerError
from paceline.launch.channel import Message
from paceline.launch.control import Lost

_CONSEQUENCES = (
    "another rank failed", "lost another host", "which leads the training, has gone",
    "lost a server", "lost the first node", "the connection to the store was lost",
    "and it writes the checkpoints",
)  # fmt: skip


_BY_OTHERS = ("SIGTERM", "SIGABRT", "SIGHUP", "SIGINT")
"""Signals by which MPI ends ranks when another one is lost."""


def order(failure: Message | Lost) -> int:
    """Causes first.

    0 what a rank says of itself, 1 a rank that was killed, 2 a lost host, 3 an end without a word,
    4 hearsay, 5 an agent that was told to end, as MPI tells all when one is lost.
    """
    if isinstance(failure, Lost):
        return 2
    report = failure["report"]
    message = str(report["message"])
    if report.get("told"):
        return 5
    if report.get("wordless"):
        was_killed = "was killed by" in message and not any(n in message for n in _BY_OTHERS)
        return 1 if was_killed else 3
    of_others = report["kind"] in ("DeadlineError", "LostError")
    return 4 if of_others or any(text in message for text in _CONSEQUENCES) else 0


def may_pass(failure: Message | Lost) -> bool:
    """Whether the same training, begun again, may go on: nothing is wrong with what it computes."""
    return order(failure) > 0


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
    joint = " " if message.startswith(("was killed", "exited with", "was told")) else ": "
    return f"rank {rank} on host {host}{joint}{message}"
