"""Examples in docstrings (`>>> ...`) are shown as code, without the directions for doctest."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
DIRECTION = re.compile(r"\s*# doctest:.*")


class Doctests(griffe.Extension):
    """Puts a fence around every example."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)


def fenced(found: re.Match[str]) -> str:
    return f"```pycon\n{DIRECTION.sub('', found[0])}\n```"
