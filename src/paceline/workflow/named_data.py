"""Data that `paceline init --data` names: looked for, so that no file names what is not there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from paceline.data.registry import names
from paceline.errors import ConfigError, shown, unknown_name
from paceline.references import PARQUET, is_reference
from paceline.workflow.starting import (
    Data,
    Found,
    find_arrays,
    find_tables,
    is_idx_folder,
    is_image_folder,
)

FINDERS = {".csv": find_tables, ".npy": find_arrays}
"""What looks at files of one's own, by their endings."""


def named_data(folder: Path, name: str, found: Found) -> Data:
    """What `name` is, seen from `folder`, of which `found` is known."""
    place = name.rstrip("/") or name
    known = next((each for each in found.data if each.place == place), None)
    if known is not None:
        return known
    path = folder / place
    if path.is_dir():
        return _folder(path, place)
    if path.is_file() and path.suffix in FINDERS:
        return _file(path, place)
    if path.is_file() and path.suffix != ".parquet":
        raise ConfigError(
            f"--data {shown(name)} is a {path.suffix or 'file'}, which is not read as it is: give a"
            " folder of pictures by class, a .csv, .npy or .parquet file, or a function of yours as"
            " file.py:function"
        )
    if is_reference(name):
        source = name.rpartition(":")[0]
        if source.endswith(".py") and not (folder / source).is_file():
            raise ConfigError(f"--data {shown(name)}: there is no file {folder / source}")
        return Data(kind="named", place=name)
    if name in names() or name.startswith(PARQUET):
        return Data(kind="named", place=name)
    if path.is_file():
        return Data(kind="named", place=f"{PARQUET}{place}")
    raise ConfigError(
        f"--data {unknown_name('data set', name, names())}, a folder of pictures by class, a .csv,"
        " .npy or .parquet file, or a function of yours as file.py:function"
    )


def _folder(path: Path, place: str) -> Data:
    if is_image_folder(path):
        return Data(kind="images", place=place)
    if is_idx_folder(path):
        return Data(kind="idx", place=place)
    inside = [each.name for ending in FINDERS for each in sorted(path.glob(f"*{ending}"))]
    if any(path.glob("*.parquet")):
        return Data(kind="named", place=f"{PARQUET}{place}")
    more = f"; name one of its files, as {place}/{inside[0]}" if inside else ""
    raise ConfigError(
        f"--data {shown(place)} is a folder without pictures by class: put the pictures of each"
        f" class into a folder of its own, such as cat/ and dog/{more}"
    )


def _file(path: Path, place: str) -> Data:
    """A table, or arrays, that may lie in another folder."""
    found, passed = FINDERS[path.suffix](path.parent)
    for each in found:
        if each.place == path.name:
            beside = Path(place).parent / each.targets
            targets = beside.as_posix() if each.targets else ""
            return dataclasses.replace(each, place=place, targets=targets)
    why = next((text for text in passed if text.startswith(path.name)), "")
    raise ConfigError(f"--data {shown(place)} cannot be used: {why or 'it is no array of inputs'}")
