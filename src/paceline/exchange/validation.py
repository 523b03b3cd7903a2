"""What is looked at before a message from another node touches weights.

A message that is not what its kind demands is refused as a whole, and its sender is named.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from paceline.exchange.wire import BadMessageError, Kind, Request
from paceline.local.finite import DIVERGED, bad_of, is_finite

MOST_TEXT = 64 * 2**20
"""Bytes of a text between nodes at most: notes of models are far shorter."""
MOST_NUMBERS = 2**24
"""Numbers of one sum over workers at most: those of evaluations and buffers are far fewer."""


def check_finite(values: torch.Tensor, what: str) -> None:
    if not is_finite(values):
        raise BadMessageError(f"sent {what} of which {bad_of(values)} are not finite", DIVERGED)


def check_request(request: Request, elements: int) -> None:
    """Refuse a request to a server whose shard has so many elements, if it makes no sense."""
    if request.kind not in list(Kind):
        raise BadMessageError(f"sent a request of the unknown kind {request.kind}")
    if request.update < 0 or request.sequence < 0 or request.length < 0:
        raise BadMessageError(f"sent a {Kind(request.kind).name} with a negative number")
    most = MOST_NUMBERS if request.kind == Kind.TOTAL else MOST_TEXT
    if request.kind == Kind.PUSH:
        if request.length != elements:
            raise BadMessageError(
                f"announced a gradient of {request.length} elements where the server has {elements}"
            )
    elif request.length > most:
        raise BadMessageError(f"announced {request.length} elements, more than {most}")


def check_push(request: Request, gradient: torch.Tensor) -> None:
    """Refuse a gradient that has come, if it or what was said of it makes no sense."""
    if request.samples < 0 or request.total <= 0:
        raise BadMessageError(f"sent a gradient of {request.samples} samples of {request.total}")
    if not (math.isfinite(request.rate) and request.rate >= 0):
        raise BadMessageError(f"sent a gradient at the rate {request.rate}")
    check_finite(gradient, f"a gradient for update {request.update + 1}")


def check_word(word: Any, numbers: tuple[str, ...]) -> None:
    """Refuse a word in which one of these is not a whole number, or what it told is not three."""
    try:
        good = (
            all(type(word[name]) is int and word[name] >= 0 for name in numbers)
            and len(word["told"]) == 3
            and all(type(number) in (int, float) for number in word["told"])
            and all(type(count) is int for count in word["staleness"].values())
            and type(word["stop"]) is bool
        )
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise BadMessageError("sent a word that says nothing")
