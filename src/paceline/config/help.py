"""The settings and their docstrings, for `paceline train --help`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Any

from paceline.schema import config as settings
from paceline.schema.codec import field_types


def settings_help() -> list[tuple[str, list[tuple[str, str]]]]:
    """Sections, each with (key and default, what it means)."""
    docs = _field_docs()
    return _section(settings.Config, "", docs)


def _section(
    cls: type, prefix: str, docs: dict[str, dict[str, str]]
) -> list[tuple[str, list[tuple[str, str]]]]:
    rows: list[tuple[str, str]] = []
    nested: list[tuple[str, list[tuple[str, str]]]] = []
    for field in dataclasses.fields(cls):
        kind = field_types(cls)[field.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            nested += _section(kind, f"{prefix}{field.name}.", docs)
            continue
        text = docs[cls.__name__].get(field.name, "")
        rows.append((f"{prefix}{field.name} = {_default(field)}", text))
    title = prefix.rstrip(".") or "the run"
    return [(title, rows), *nested]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "{}"
    if field.default is None:
        return "..."
    if isinstance(field.default, bool):
        return str(field.default).lower()
    if isinstance(field.default, str):
        return f'"{field.default}"'
    if isinstance(field.default, tuple):
        return "[]"
    return str(field.default)


def _field_docs() -> dict[str, dict[str, str]]:
    """Class name -> field name -> the docstring that stands under the field."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(settings)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        docs = found.setdefault(node.name, {})
        for before, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(before, ast.AnnAssign)
                and isinstance(before.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                docs[before.target.id] = " ".join(after.value.value.split())
    return found
