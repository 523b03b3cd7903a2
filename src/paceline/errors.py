"""Every exception Paceline raises on purpose.

    PacelineError                 never raised itself
    |-- UserError                 the user can put it right; exit code 2
    |   |-- ConfigError           a key or a value of the configuration
    |   |-- ModelError            a model that is unknown, or weights that do not fit it
    |   |-- DataError             data that is missing, damaged or does not fit the model
    |   |-- RunDirectoryError     a run directory that is missing, busy or damaged
    |   |-- StrategyError         a local strategy that this model or machine cannot run
    |   |-- ProofError            a plan that would not give the weights of one process
    |   `-- UnsupportedError      a combination outside the support matrix
    `-- RunError                  the run could not go on; exit code 1
        |-- DivergedError         the loss became NaN or exploded
        |-- WorkerError           a rank raised, exited or was killed
        |   |-- LostError         a node that a leg needs has gone
        |   `-- RankError         a rank of one node in a leg over several
        |-- DeadlineError         a rank did not arrive in time
        `-- StorageError          a checkpoint or event could not be written

A message names the value, the rule and the remedy, in one sentence where it can.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Base of everything Paceline raises on purpose."""

    exit_code = 1


class UserError(PacelineError):
    """Something the user can put right."""

    exit_code = 2


class ConfigError(UserError):
    """A key or a value of the configuration breaks a rule."""


class ModelError(UserError):
    """A model is unknown, cannot be built, or weights do not fit it."""


class DataError(UserError):
    """Data is missing, damaged, or does not fit the model."""


class RunDirectoryError(UserError):
    """A run directory is missing, in use, or not readable."""


class StrategyError(UserError):
    """A local strategy cannot run this model on this machine."""


class ProofError(UserError):
    """A plan gives this model other weights than one process does."""


class UnsupportedError(UserError):
    """A combination that the support matrix does not list."""


class RunError(PacelineError):
    """The run could not go on."""


class DivergedError(RunError):
    """The loss became NaN, infinite, or far larger than it was."""


class WorkerError(RunError):
    """A rank raised, exited or was killed."""


class LostError(WorkerError):
    """A node that a leg needs has gone; the others can go on without it."""


class RankError(WorkerError):
    """A rank of one node in a leg over several has ended or hangs: whose fault a failure was."""


class DeadlineError(RunError):
    """A rank did not arrive at a collective in time."""


class StorageError(RunError):
    """Something could not be written; what was there before is intact."""


LONGEST_VALUE = 160
"""Characters of a value that a message repeats: enough to find it again, and still one sentence."""


def shown(value: object) -> str:
    """A value as a message repeats it: as Python writes it, the middle left out where it is long.

    >>> shown("adma"), shown("x" * 1000)[-14:]
    ("'adma'", "xxxxxxxxxxxxx'")
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; lists without end
        return f"a {type(value).__name__} that is too large to print"
    return shortened(text)


def shortened(text: str) -> str:
    """A text for the middle of a sentence: one line, its middle left out where it is too long."""
    text = "".join(each if each.isprintable() else " " for each in text)
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[: LONGEST_VALUE - 40]}...{text[-37:]}"


_NO_ROOM = ("can't allocate memory", "Unable to allocate", "not enough memory")
"""How torch and numpy say that memory has run out; torch has no exception of its own for it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory for something, whoever asked for it."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _NO_ROOM)


RAISED_BY = "raised by "
"""Begins the note of an error that came out of the user's own code."""


def first_line(error: Exception) -> str:
    """What an error says first, or its kind where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def is_of_users_code(error: BaseException) -> bool:
    """Whether it came out of the user's model, loss or step."""
    return any(note.startswith(RAISED_BY) for note in getattr(error, "__notes__", ()))


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> str:
    """One sentence for a name that is not in a list.

    >>> unknown_name("model", "alexnte", ["alexnet", "vgg16"])
    "unknown model 'alexnte': did you mean 'alexnet'? Valid: alexnet, vgg16"
    """
    choices = sorted(valid)
    # Likeness takes a time that grows with the square of the length.
    likely = len(name) <= LONGEST_VALUE
    close = difflib.get_close_matches(name, choices, n=1) if likely else []
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {kind} {shown(name)}: {hint}Valid: {', '.join(choices)}"
