"""What people type after `paceline forecast`, made into numbers."""

from __future__ import annotations

import itertools

from paceline.cost.transfer import described_link
from paceline.errors import ConfigError, shown
from paceline.schema.machines import Link
from paceline.schema.units import duration, rate

MOST_NODES = 1_000_000
LONGEST_CURRENCY = 8
FASTEST = 1e6
"""More than lies between any two machines."""


def node_counts(text: str) -> tuple[int, ...]:
    """Numbers of nodes; `...` goes on as the two before it did, doubling or adding.

    >>> node_counts("1,2,4,...,64")
    (1, 2, 4, 8, 16, 32, 64)
    >>> node_counts("2,4,6,...,10")
    (2, 4, 6, 8, 10)
    """
    words = [word.strip() for word in text.split(",")]
    found: list[int] = []
    for place, word in enumerate(words):
        if word == "...":
            if len(found) < 2 or place + 1 >= len(words) or not _count(words[place + 1]):
                raise _wrong_nodes(text)
            found += _going_on(found, _count(words[place + 1]))
        elif _count(word):
            found.append(_count(word))
        else:
            raise _wrong_nodes(text)
    return tuple(sorted(set(found)))


def _count(word: str) -> int:
    """A number of nodes, or 0 for what is none."""
    number = int(word) if word.isdecimal() and len(word) <= len(str(MOST_NODES)) else 0
    return number if number <= MOST_NODES else 0


def _going_on(found: list[int], end: int) -> list[int]:
    before, last = found[-2:]
    grows = last > before
    # 1, 2 could mean both; what doubles up to now doubles on
    doubling = all(b == 2 * a for a, b in itertools.pairwise(found))
    step, result = last - before, []
    while grows and (last := last * 2 if doubling else last + step) < min(end, MOST_NODES):
        result.append(last)
    return result


def _wrong_nodes(text: str) -> ConfigError:
    return ConfigError(
        f"--nodes {shown(text)} must be whole numbers from 1 to {MOST_NODES:,} with commas, such as"
        " 1,2,4,...,64"
    )


def link_from(text: str) -> Link:
    """A link as it is sold: rate and latency.

    >>> round(link_from("1Gbit/s,0.2ms").latency.median, 6)
    0.0002
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2:
        raise ConfigError(
            f"--link {shown(text)} must be a rate and a latency with a comma between, such as"
            " 1Gbit/s,0.2ms"
        )
    return described_link(rate(parts[0].removesuffix("/s"), "--link"), duration(parts[1], "--link"))


def speeds(text: str) -> tuple[float, ...]:
    """Speeds against the measured host.

    >>> speeds("1,1/20")
    (1.0, 0.05)
    """
    found = []
    for word in text.split(","):
        above, _, below = word.partition("/")
        try:
            value = float(above) / float(below or 1)
        except (ValueError, ZeroDivisionError):
            value = 0.0
        if not 1 / FASTEST <= value <= FASTEST:
            raise ConfigError(
                f"--mix {shown(text)} must be speeds above 0 against the measured host, such as"
                f" 1,1/21, and at most {FASTEST:g} times as fast or slow"
            )
        found.append(value)
    return tuple(found)


def price_from(text: str) -> tuple[float | None, float | None]:
    """A price per node and hour, or per node: one of the two.

    >>> price_from("0.4/h"), price_from("900")
    ((0.4, None), (None, 900.0))
    """
    hourly = text.strip().endswith("/h")
    try:
        value = float(text.strip().removesuffix("/h"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(
            f"--price {shown(text)} must be what one machine costs, such as 900, or costs per hour,"
            " such as 0.4/h"
        )
    return (value, None) if hourly else (None, value)


def currency_from(text: str) -> str:
    """A currency as people write it after a number.

    >>> currency_from("EUR")
    'EUR'
    """
    if len(text) > LONGEST_CURRENCY or not text.isprintable():
        raise ConfigError(
            f"--currency {shown(text)} must be at most {LONGEST_CURRENCY} characters, such as EUR"
        )
    return text.strip()
