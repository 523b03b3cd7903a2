"""Word of nodes that the launcher has lost, left where those look who would wait for them.

A host whose power fails closes no connection: whoever waits for it waits until a deadline. The
launcher hears every agent twice a second and knows within seconds. Imports no torch: agents use it.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from paceline.schema.plain import MOST_BYTES, checked, parse_json


def losses_file(run: Path, node: int) -> Path:
    """Where `node` looks for nodes that were lost: one JSON line each, as they go."""
    return run / f"node-{node}" / "lost.jsonl"


def leave_word(run: Path, node: int, lost: int, why: str = "") -> None:
    """Tell `node` of a node that was lost, and how."""
    path = losses_file(run, node)
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"node": lost, "why": why}) + "\n")


class Losses:
    """What one node has been told so far."""

    def __init__(self, run: Path, node: int) -> None:
        self._path, self._read = losses_file(run, node), 0

    def fresh(self) -> list[int]:
        """Nodes that were lost since the last call; a line that is damaged names none."""
        return [node for node, _ in self.fresh_words()]

    def fresh_words(self) -> list[tuple[int, str]]:
        """The same, each with what the launcher says of it."""
        try:
            with self._path.open("rb") as file:
                lines = file.read(MOST_BYTES).split(b"\n")[:-1]
        except OSError:
            return []
        fresh, self._read = lines[self._read :], len(lines)
        found = []
        for line in fresh:
            with contextlib.suppress(ValueError):
                word = checked(parse_json(line), {"node": int, "why?": str})
                found.append((int(word["node"]), str(word.get("why") or "")))
        return found
