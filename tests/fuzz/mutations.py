"""Damage: bytes and plain data changed as disks, editors and attackers change them.

Every function takes a `random.Random`: hypothesis hands in one that it can shrink, the long run
one with a seed that it prints.
"""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import tomli_w

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 255, 65536, 100_000, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1,
    10**30, 10**400, 0.0, -0.0, 1e-320, 1e18, 1e308, -1e308,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS: tuple[str, ...] = (
    "", " ", "a", "auto", "nan", "-1", "0", "x" * 5000, "a\0b", "a/../../b", "\n", "\r\n", "\t",
    "\x1b[31mred\x1b[0m", "[red]text[/red]", "[/]", "=1+1", "<script>alert(1)</script>", "é", "😀",
    "\u202e", "%s%n", "{0}", "builtins:exit", "os:system", "~", "/dev/null", "/proc/self/mem", "²",
)  # fmt: skip
WORDS: tuple[bytes, ...] = (
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"[]", b"{}", b'""', b"9" * 5000,
    b"\0", b"\xff", b"[" * 500, b'{"a":' * 500, b"\\ud800", b"\\u0000", b"\n", b",", b'"', b"=",
    b"a." * 300 + b"a", b"\xed\xa0\x80", b"0x" + b"f" * 5000, b"1979-05-27T07:32:00Z",
)  # fmt: skip


def damaged_bytes(random: random.Random, data: bytes) -> bytes:
    """A file with one to three faults of a disk or an editor."""
    for _ in range(random.randint(1, 3)):
        data = _one_fault(random, data)
    return data


def _one_fault(random: random.Random, data: bytes) -> bytes:
    at = random.randint(0, len(data))
    to = min(len(data), at + random.choice((1, 2, 4, 8, 64, 512)))
    kind = random.randint(0, 8)
    if kind == 0:  # a bit
        return (
            data[:at]
            + bytes(b ^ (1 << random.randint(0, 7)) for b in data[at : at + 1])
            + (data[at + 1 :])
        )
    if kind == 1:  # cut short
        return data[:at]
    if kind == 2:  # a hole, as after a crash
        return data[:at] + bytes(to - at) + data[to:]
    if kind == 3:
        return data[:at] + data[to:]
    if kind == 4:  # twice
        return data[:to] + data[at:to] + data[to:]
    if kind == 5:
        return data[:at] + random.choice(WORDS) + data[at:]
    if kind == 6:
        return data[:at] + random.choice(WORDS) + data[to:]
    if kind == 7:
        noise = bytes(random.randint(0, 255) for _ in range(to - at))
        return data[:at] + noise + data[to:]
    numbers = list(re.finditer(rb"-?\d+(?:\.\d+)?", data))
    if not numbers:
        return data
    found = numbers[random.randint(0, len(numbers) - 1)]
    return data[: found.start()] + str_of(random).encode() + data[found.end() :]


def str_of(random: random.Random) -> str:
    """A number as JSON and TOML write it, near the edges of what is allowed."""
    return json.dumps(random.choice(NUMBERS)).replace("Infinity", "inf")


def odd_value(random: random.Random) -> Any:
    """A value of any type and size."""
    kind = random.randint(0, 7)
    if kind <= 2:
        return random.choice(NUMBERS)
    if kind <= 4:
        return random.choice(TEXTS)
    if kind == 5:
        return random.choice((True, False, None))
    if kind == 6:
        return [odd_value(random) for _ in range(random.randint(0, 3))]
    deep: Any = odd_value(random)
    for _ in range(random.choice((1, 5, 70, 500))):
        deep = {"a": deep} if random.randint(0, 1) else [deep]
    return deep


def damaged_data(random: random.Random, value: Any) -> Any:
    """Plain data with one to three values or keys that are not what they were."""
    value = copy.deepcopy(value)
    for _ in range(random.randint(1, 3)):
        value = _one_swap(random, value)
    return value


def _one_swap(random: random.Random, value: Any) -> Any:
    place, holder = value, None
    key: Any = None
    while isinstance(place, dict | list) and place and (holder is None or random.randint(0, 5)):
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        holder, key = place, keys[random.randint(0, len(keys) - 1)]
        place = place[key]
    if holder is None:
        return odd_value(random)
    kind = random.randint(0, 5)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[random.choice(TEXTS)] = place
    elif kind == 2 and isinstance(holder, list):
        holder.insert(key, place)
    elif kind == 3 and isinstance(place, int | float):
        holder[key] = random.choice(NUMBERS)
    else:
        holder[key] = odd_value(random)
    return value


def damaged_json(random: random.Random, text: str) -> bytes:
    """A JSON text with other values inside, or other bytes."""
    if random.randint(0, 2) == 0:
        return damaged_bytes(random, text.encode())
    return _json(damaged_data(random, json.loads(text)))


def damaged_json_lines(random: random.Random, text: str) -> bytes:
    """The same for a file of one JSON text per line."""
    if random.randint(0, 3) == 0:
        return damaged_bytes(random, text.encode())
    lines = [line.encode() for line in text.splitlines()]
    at = random.randint(0, len(lines) - 1)
    lines[at] = _json(damaged_data(random, json.loads(lines[at])))
    return b"\n".join(lines) + b"\n"


def damaged_toml(random: random.Random, tables: dict[str, Any]) -> bytes:
    """The same for TOML; what TOML cannot write goes through bytes alone."""
    changed = tables
    if random.randint(0, 3):
        changed = damaged_data(random, tables)
    try:
        text = tomli_w.dumps(changed).encode()
    except (TypeError, ValueError, RecursionError, AttributeError):
        text = tomli_w.dumps(tables).encode()
        return damaged_bytes(random, text)
    return text if changed is not tables else damaged_bytes(random, text)


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    except RecursionError:
        return b"[" * 3000
