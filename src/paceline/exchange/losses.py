"""Word of nodes that the launcher has lost, left where those look who would wait for them.

A host whose power fails closes no connection: whoever waits for it waits until a deadline. The
launcher hears every agent twice a second and knows within seconds. How many seconds, the node that
leads the legs leaves word of in turn. Imports no torch: agents use it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from paceline.run import write_whole
from paceline.schema.plain import MOST_BYTES, checked, parse_json, read_json_file


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


def patience_file(run: Path) -> Path:
    """Where the first node says how long each of the others is worth waiting for."""
    return run / "node-0" / "patience.json"


def leave_patience(run: Path, seconds: Mapping[int, float]) -> None:
    """Say how many seconds without a word each node is worth waiting for.

    What a full disk does not take is advice alone: hosts are waited for as long as before.
    """
    path = patience_file(run)
    text = json.dumps({str(node): round(value, 3) for node, value in seconds.items()})
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        write_whole(path, text)


class Patience:
    """What the first node has said of it so far."""

    def __init__(self, run: Path) -> None:
        self._path, self._seen = patience_file(run), -1

    def fresh(self) -> dict[str, float] | None:
        """Seconds by number of node, where they have changed; None where they have not."""
        with contextlib.suppress(OSError, ValueError):
            changed = self._path.stat().st_mtime_ns
            if changed != self._seen:
                self._seen = changed
                return dict(checked(read_json_file(self._path), {"*": float}))
        return None
