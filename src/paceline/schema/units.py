"""Rates, times and sizes as people write them: `100mbit`, `5ms`, `2gb`."""

from __future__ import annotations

import re

from paceline.errors import ConfigError, shown

_RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_SIZE_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def _parse(
    value: object, key: str, units: dict[str, int] | dict[str, float], example: str
) -> float:
    match = _NUMBER_AND_UNIT.fullmatch(value) if isinstance(value, str) else None
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in units:
        raise ConfigError(
            f"{key} = {shown(value)} must be a number and a unit ({', '.join(units)}) in quotes,"
            f' for example "{example}"'
        )
    number = float(match.group(1)) * units[unit]
    if number > 2**63:
        raise ConfigError(f"{key} = {shown(value)} is more than any machine has: give less")
    return number


def rate(value: object, key: str = "rate") -> float:
    """Bits per second.

    >>> rate("100mbit")
    100000000.0
    """
    bits = _parse(value, key, _RATE_UNITS, "100mbit")
    if bits < 8000:
        raise ConfigError(
            f'{key} = {shown(value)} must be at least "8kbit"; to stop all traffic use a fault of'
            ' kind "cut"'
        )
    return bits


def rate_text(bits_per_second: float) -> str:
    """A rate as it would be written in a lab file.

    >>> rate_text(1e9)
    '1gbit'
    """
    for unit in ("gbit", "mbit", "kbit"):
        if bits_per_second >= _RATE_UNITS[unit]:
            return f"{bits_per_second / _RATE_UNITS[unit]:g}{unit}"
    return f"{bits_per_second:g}bit"


def duration(value: object, key: str = "duration") -> float:
    """Seconds.

    >>> duration("5ms")
    0.005
    """
    return _parse(value, key, _TIME_UNITS, "10s")


def size(value: object, key: str = "size") -> int:
    """Bytes.

    >>> size("2gb")
    2000000000
    """
    return int(_parse(value, key, _SIZE_UNITS, "2gb"))
