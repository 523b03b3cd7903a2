"""Dataclasses to plain data and back, with errors a person can act on.

`decode(Config, {"train": {"epochs": "five"}})` says which key, which value and
which rule; `encode` gives what JSON and TOML can hold. Nothing is ever pickled.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import ConfigError, RunDirectoryError, shortened, shown, unknown_name
from paceline.schema.plain import LARGEST, read_json_file

T = TypeVar("T")
Reader = Callable[[Any, str], Any]
"""From a value and its path to what it stands for; ConfigError where it stands for nothing."""

_PLAIN = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def rule(
    *,
    default: Any = dataclasses.MISSING,
    minimum: float | None = None,
    maximum: float | None = None,
    names: Iterable[str] | None = None,
) -> Any:
    """A dataclass field with bounds, or names to choose from, that `check_bounds` enforces."""
    metadata = {"minimum": minimum, "maximum": maximum, "names": names}
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """The resolved type of every field of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def encode(value: Any, *, keep_none: bool = True) -> Any:
    """Plain data (dict, list, str, number, bool, None) for JSON, or for TOML without None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {k: encode(v, keep_none=keep_none) for k, v in pairs if keep_none or v is not None}
    if isinstance(value, Mapping):
        return {
            str(k): encode(v, keep_none=keep_none)
            for k, v in value.items()
            if keep_none or v is not None
        }
    if isinstance(value, list | tuple):
        return [encode(item, keep_none=keep_none) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def decode(cls: type[T], data: Any, where: str = "") -> T:
    """Build the dataclass `cls` from plain data; `where` is the path for messages."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or 'the file'} is {shown(data)}, but must be a table of keys")
    readers, needed = _readers(cls)  # type: ignore[arg-type]  # a class can be hashed
    values = {}
    for key, value in data.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in readers:
            raise ConfigError(f"{unknown_name('key', path, _paths(where, readers))}")
        values[key] = readers[key](value, path)
    for name in needed:
        if name not in values:
            raise ConfigError(f"{where or 'the file'} lacks the key {name!r}")
    result = cls(**values)
    check_bounds(result, where)
    return result


def check_bounds(value: Any, where: str = "") -> None:
    """Raise ConfigError where a field lies outside the bounds its `rule` gives."""
    for field in _bounded(type(value)):  # type: ignore[arg-type]
        low, high = field.metadata["minimum"], field.metadata["maximum"]
        number = getattr(value, field.name)
        names = field.metadata["names"]
        if names is not None and number != field.default and number not in names:
            path = f"{where}.{field.name}" if where else field.name
            valid = ", ".join((str(field.default), *names))
            raise ConfigError(f"{path} = {shown(number)} is not one of its choices: {valid}")
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        path = f"{where}.{field.name}" if where else field.name
        # `not >=` instead of `<` so that NaN is refused too
        if low is not None and not number >= low:
            raise ConfigError(f"{path} = {shown(number)} is too small: it must be at least {low:g}")
        if high is not None and not number <= high:
            raise ConfigError(f"{path} = {shown(number)} is too large: it must be at most {high:g}")


@functools.cache
def _bounded(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    """The fields with a `rule`."""
    return tuple(field for field in dataclasses.fields(cls) if "minimum" in field.metadata)


@functools.cache
def _readers(cls: Any) -> tuple[dict[str, Reader], tuple[str, ...]]:
    """What reads each field of a dataclass, and the fields that must be there."""
    needed = tuple(
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    return {name: _reader(kind) for name, kind in field_types(cls).items()}, needed


def _paths(where: str, names: Mapping[str, Any]) -> list[str]:
    return [f"{where}.{name}" if where else name for name in names]


@functools.cache
def _reader(kind: Any) -> Reader:
    """What reads a value of a type: worked out once, since events come by hundreds a second."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return lambda value, path: value
    if origin is types.UnionType or origin is typing.Union:
        return _union(inner)
    if origin is typing.Literal:
        return functools.partial(_choice, inner)
    if origin is tuple:
        return functools.partial(_tuple, _reader(inner[0]))
    if origin in (dict, Mapping) or kind is dict:
        return functools.partial(_table, _reader(inner[1] if inner else object))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return functools.partial(decode, kind)
    return functools.partial(_plain, kind)


def _union(options: tuple[Any, ...]) -> Reader:
    readers = [_reader(option) for option in options if option is not type(None)]
    is_optional = len(readers) < len(options)

    def read(value: Any, path: str) -> Any:
        if value is None and is_optional:
            return None
        if len(readers) == 1:
            return readers[0](value, path)
        for reader in readers:
            try:
                return reader(value, path)
            except ConfigError:
                continue
        wanted = " or ".join(_PLAIN.get(o, str(o)) for o in options if o is not type(None))
        raise ConfigError(f"{path} = {shown(value)} must be {wanted}")

    return read


def _choice(choices: tuple[Any, ...], value: Any, path: str) -> Any:
    if value not in choices or isinstance(value, bool) != any(c is value for c in (True, False)):
        valid = ", ".join(str(choice) for choice in choices)
        raise ConfigError(f"{path} = {shown(value)} is not one of its choices: {valid}")
    return value


def _tuple(item: Reader, value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{path} = {shown(value)} must be a list, as in [ ... ]")
    return tuple(item(each, f"{path}[{i}]") for i, each in enumerate(value))


def _table(item: Reader, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} = {shown(value)} must be a table of keys")
    return {str(k): item(each, shortened(f"{path}.{k}")) for k, each in value.items()}


def _plain(kind: Any, value: Any, path: str) -> Any:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and kind in (int, float):
        if not -LARGEST <= value <= LARGEST:
            raise ConfigError(f"{path} = {shown(value)} must fit into 64 bits")
        return kind(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{path} = {shown(value)} must be {_PLAIN.get(kind, kind.__name__)}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{path} = {value} must be a finite number")
    if kind is str and "\0" in value:
        raise ConfigError(f"{path} = {shown(value)} must be a text without zero bytes")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON so that a reader never sees half a file."""
    text = json.dumps(encode(value), indent=2, allow_nan=True) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_json(cls: type[T], path: Path) -> T:
    """Read a dataclass that `write_json` wrote, or that a person edited since."""
    try:
        data = read_json_file(path)
    except FileNotFoundError:
        raise RunDirectoryError(f"{path} does not exist") from None
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RunDirectoryError(f"{path} is not valid JSON: {error}") from None
    try:
        return decode(cls, data)
    except ConfigError as error:
        raise RunDirectoryError(f"{path}: {error}") from None
