"""Files of a run on their way between hosts that share none: `file` messages, piece by piece."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.errors import shown
from paceline.launch.channel import CHUNK, Message
from paceline.run import point


def pieces_of(root: Path, names: Sequence[str]) -> Iterator[Message]:
    """The files below `root` as the fields of `file` messages.

    A link follows what it points to, so that at the other end it never points to a part of it.
    """
    done: set[str] = set()
    for name in names:
        place = root / name
        target = place.readlink() if place.is_symlink() else None
        real = name if target is None else str(Path(name).parent / target)
        if real not in done:
            done.add(real)
            yield from _pieces(root, real)
        if target is not None:
            yield {"path": name, "link": str(target)}


def _pieces(root: Path, name: str) -> Iterator[Message]:
    place = root / name
    for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
        if not path.is_file():
            continue
        with path.open("rb") as file:
            at = 0
            while True:
                data = file.read(CHUNK)
                where = str(path.relative_to(root))
                yield {"path": where, "at": at, "data": base64.b64encode(data).decode()}
                at += len(data)
                if len(data) < CHUNK:
                    break


def take_piece(root: Path, message: Message) -> None:
    """Write one piece that `pieces_of` made below `root`, and nowhere else."""
    place = root / message["path"]
    place = place.parent.resolve() / place.name
    named = place.parent / (message.get("link") or place.name)
    if not all(path.resolve().is_relative_to(root.resolve()) for path in (place, named)):
        raise ValueError(f"{shown(message['path'])} does not lie inside the run")
    place.parent.mkdir(parents=True, exist_ok=True)
    if message.get("link"):
        point(place, message["link"])
        return
    at = message.get("at")
    try:
        data = base64.b64decode(message["data"], validate=True)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"a piece of {shown(message['path'])} came damaged") from None
    with place.open("wb" if at == 0 else "r+b") as file:
        if file.seek(0, os.SEEK_END) != at:
            raise ValueError(f"pieces of {shown(message['path'])} are missing")
        file.write(data)
