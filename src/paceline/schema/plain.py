"""Text to plain data: JSON and TOML, within the bounds that every file and message of ours keeps.

The parsers of the standard library let through what later code cannot bear: numbers of thousands
of digits, nesting that ends the interpreter, zero bytes in what becomes a path, a key given twice.
Here everything that is wrong with a text is a ValueError whose message is a reason, so that a
reader has one kind of fault to name. No torch.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from paceline.errors import ConfigError, shortened, shown
from paceline.text import is_one_line

DEEPEST: Final = 64
"""Tables and lists inside each other; the deepest of our own files has 8."""
LARGEST: Final = 2**63 - 1
"""Whole numbers, of either sign: what a tensor, a file's size and other programs can hold."""
MOST_BYTES: Final = 64 * 2**20
"""Of a file that is read whole; the largest of our own, machines.json of many hosts, has a few."""
ONE_LINE: Final = "a text of one line"
"""In a shape: a text that a terminal can show as it is."""
MOST_TOML_BYTES: Final = 2**20
"""Of a file that a person writes: the parser takes about a second for it."""


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """A file of text, in UTF-8; OSError or ValueError."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it is larger than {most >> 20} MB")
    return data.decode()


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says.

    >>> parse_json('{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    >>> parse_json("1" * 5000)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: the whole number 1111...1 is too large: it must be at most 9223372036854775807
    """
    if isinstance(text, bytes):
        text = text.decode()
    try:
        value = _JSON.decode(text)
    except RecursionError:
        raise _too_deep() from None
    # Looking at every value is needed only where a look at the text cannot exclude the faults.
    if text.count("[") + text.count("{") > DEEPEST or "\\u" in text:
        check_plain(value)
    return value


def read_json_file(path: Path) -> Any:
    """What a file of JSON says; OSError or ValueError."""
    return parse_json(read_text(path))


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; dates and times are refused, since nothing of ours takes them."""
    if len(text) > MOST_TOML_BYTES:
        raise ValueError(f"it is longer than {MOST_TOML_BYTES >> 20} MB")
    if _has_long_key(text):
        raise ValueError(f"it has a key of more than {DEEPEST} parts")
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python itself refuses numbers of more than 4,300 digits
        raise _too_large("of thousands of digits") from None
    check_plain(tables)
    return tables


def _has_long_key(text: str) -> bool:
    """Whether a key has too many parts: the parser takes a time that grows with their square."""
    for line in text.splitlines():
        if line.count(".") > DEEPEST:
            *keys, last = line.split("=")
            keys += [last] if line.lstrip().startswith("[") else []
            if any(key.count(".") > DEEPEST for key in keys):
                return True
    return False


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; FileNotFoundError, or a ConfigError that names the file."""
    try:
        text = read_text(path, MOST_TOML_BYTES)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{shown(str(path))} cannot be read as text: {reason}") from None
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def parse_value(text: str, option: str) -> Any:
    """The value in `option KEY=VALUE`: TOML, or else a text, so that quotes can be left out.

    >>> parse_value("0.5", "--set"), parse_value("adam", "--set")
    (0.5, 'adam')
    """
    try:
        tables = parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        tables = {"value": text}
    except ValueError as error:
        value = shown(text).strip("'\"")
        raise ConfigError(f"{shortened(option)} {value} cannot be used: {error}") from None
    # More than one key: the text has lines of its own, and is a text.
    return tables["value"] if len(tables) == 1 else text


def check_plain(value: Any) -> None:
    """Raise ValueError where plain data holds what files and programs cannot."""
    level: list[Any] = [value]
    for _ in range(DEEPEST + 1):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                _check_texts(each)
                below += each.values()
            elif isinstance(each, list | tuple):
                below += each
            else:
                _check_single(each)
        if not below:
            return
        level = below
    raise _too_deep()


def checked(value: Any, shape: Any, name: str = "it") -> Any:
    """The value, if it has the shape that is expected; else a ValueError that names what has not.

    A shape is a type (`float` takes whole numbers too, and finite ones alone), `ONE_LINE`, a list
    with the shape of its entries, or a table of shapes. In a table a key that ends with "?" may be
    missing or null, and "*" stands for every key that is there.

    >>> checked({"port": 5, "more": 1}, {"port": int, "why?": str})
    {'port': 5, 'more': 1}
    >>> checked({"port": "5"}, {"port": int})
    Traceback (most recent call last):
    ...
    ValueError: its port is '5', not a whole number
    """
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise _other(name, value, "a table")
        for key, inner in shape.items():
            if key == "*":
                for each, entry in value.items():
                    checked(each, ONE_LINE, f"a key of {name}")
                    checked(entry, inner, _inside(name, each))
            elif value.get(key.rstrip("?")) is not None or not key.endswith("?"):
                if key.rstrip("?") not in value:
                    raise ValueError(f"{_inside(name, key)} is missing")
                checked(value[key.rstrip("?")], inner, _inside(name, key.rstrip("?")))
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise _other(name, value, "a list")
        for entry in value:
            checked(entry, shape[0], f"an entry of {name}")
    elif shape is ONE_LINE:
        if not isinstance(value, str) or not is_one_line(value):
            raise _other(name, value, ONE_LINE)
    else:
        whole = isinstance(value, int) and not isinstance(value, bool)
        fits = whole if shape is int else isinstance(value, shape) or (shape is float and whole)
        if not fits or (shape is float and not math.isfinite(value)):
            raise _other(name, value, _SHAPES[shape])
    return value


_SHAPES: Final = {
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    bool: "a switch",
    list: "a list",
    dict: "a table",
}


def _inside(name: str, key: str) -> str:
    return f"its {shown(key)[1:-1]}" if name == "it" else f"{name}.{shown(key)[1:-1]}"


def _other(name: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"{name} is {shown(value)}, not {wanted}")


def _check_single(value: Any) -> None:
    if isinstance(value, str):
        _check_texts((value,))
    elif isinstance(value, bool | float) or value is None:
        return
    elif not isinstance(value, int):
        raise ValueError(f"{shown(str(value))} is a {type(value).__name__}: write it as a text")
    elif not -LARGEST <= value <= LARGEST:
        raise _too_large(shown(value))


def _check_texts(texts: Iterable[str]) -> None:
    for text in texts:
        if "\0" in text:
            raise ValueError(f"the text {shown(text)} holds a zero byte")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the text {shown(text)} holds half a character") from None


def _whole_number(text: str) -> int:
    if len(text) < 19:  # of nineteen digits, only some fit into 64 bits
        return int(text)
    if len(text) > 20 or abs(int(text)) > LARGEST:
        raise _too_large(shown(text).strip("'"))
    return int(text)


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} is there twice")
    return table


_JSON: Final = json.JSONDecoder(parse_int=_whole_number, object_pairs_hook=_table)


def _too_large(number: str) -> ValueError:
    return ValueError(f"the whole number {number} is too large: it must be at most {LARGEST}")


def _too_deep() -> ValueError:
    return ValueError(f"tables or lists are nested more than {DEEPEST} deep")
