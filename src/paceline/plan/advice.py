"""What `paceline forecast` answers in plain words: what one more machine brings. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from paceline.text import duration

PAYS = 0.5
"""A machine pays while it brings at least this part of what it does alone."""
MOST = 64
"""More machines than this are not looked at one by one."""


class Gain(NamedTuple):
    """Times as fast as one machine, and the interval."""

    speedup: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the answer is made from."""

    gain: Callable[[int], Gain | None]
    """Of so many machines, the best way; None where none fits into memory."""
    capacity: Callable[[int], float]
    """What the speeds of so many machines add up to, in units of the fastest."""
    alone_seconds: float
    """The whole training on one machine."""
    most: int
    """The largest number of machines that was asked about."""
    second: float = 1.0
    """Speed of the second machine against the measured one."""
    cause: str = ""
    """What keeps two machines from being twice as fast."""
    hourly: float | None = None
    purchase: float | None = None
    currency: str = ""


def advise(case: Case, *, worth: float) -> tuple[str, ...]:
    """A few sentences; the first one says whether one more machine is worth it.

    `worth`: the speedup from which on it is.
    """
    two = case.gain(2)
    if two is None:
        return ("not possible: no way fits into the memory of such machines",)
    like = "like this one" if case.second == 1 else f"of {case.second:.2g} times this one's speed"
    instead = (
        f"{duration(case.alone_seconds / two.speedup)} instead of {duration(case.alone_seconds)}"
        f" for this training, {_times(two.speedup)} as fast"
        f" ({_times(two.low, unit=False)} to {_times(two.high, unit=False)})"
    )
    if two.speedup < worth or two.low <= 1:
        why = f" ({case.cause})" if case.cause else ""
        return (f"not worth it: one more machine {like} means {instead}{why}",)
    last = _last_that_pays(case)
    return (
        f"worth it: one more machine {like} means {instead}",
        *_where_it_stops(case, last),
        *_cost(case, last),
    )


def _brings(case: Case, number: int) -> float | None:
    """What machine `number` adds, as a part of what it does alone."""
    before, after = case.gain(number - 1), case.gain(number)
    if before is None or after is None:
        return None
    added = case.capacity(number) - case.capacity(number - 1)
    return (after.speedup - before.speedup) / added


def _last_that_pays(case: Case) -> int:
    last = 2
    while last < min(case.most, MOST) and (_brings(case, last + 1) or 0.0) >= PAYS:
        last += 1
    return last


def _where_it_stops(case: Case, last: int) -> list[str]:
    if case.most <= 2:
        return []
    limit = min(case.most, MOST)
    if last == limit:
        part = _brings(case, last) or 0.0
        return [f"each of {limit} machines pays: the last brings {part:.0%} of its own speed"]
    part_next = _brings(case, last + 1)
    if part_next is None:
        return [f"it stops at {last} machines: with {last + 1} nothing fits into memory"]
    return [
        f"it stops paying at {last} machines: number {last + 1} would bring"
        f" {max(0.0, part_next):.0%} of its own speed"
    ]


def _cost(case: Case, last: int) -> list[str]:
    """For the second machine, and for as many as pay."""
    counts = [2] if last == 2 else [2, last]
    parts = []
    for number in counts:
        gain = case.gain(number)
        assert gain is not None
        seconds = case.alone_seconds / gain.speedup
        if case.purchase is not None:
            spent = _money((number - 1) * case.purchase, case.currency)
            saved = duration(case.alone_seconds - seconds)
            parts.append(f"{number} machines cost {spent} more and save {saved} of each training")
        elif case.hourly is not None:
            spent = _money(number * case.hourly * seconds / 3600, case.currency)
            parts.append(f"a training on {number} machines costs {spent}")
    if parts and case.hourly is not None:
        own = _money(case.hourly * case.alone_seconds / 3600, case.currency)
        parts.append(f"on one, {own}")
    return [", ".join(parts)] if parts else []


def _money(amount: float, currency: str) -> str:
    number = f"{amount:,.0f}" if amount >= 100 else f"{amount:.2g}"
    return f"{number} {currency}".strip()


def _times(factor: float, *, unit: bool = True) -> str:
    number = f"{factor:.2f}" if factor >= 0.1 else f"{factor:.1g}"
    return f"{number} times" if unit else number
