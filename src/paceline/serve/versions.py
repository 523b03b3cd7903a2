"""Folders of versions: `models/NAME/1/`, `models/NAME/2/` ...; written whole or not at all.

A version is made under a name that starts with a dot and renamed when all of it is on the disk, so
that a server never sees half of one, and a full disk costs the new version and no other.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError, ModelError, PacelineError, StorageError, shown
from paceline.run import flush
from paceline.schema.checkpoint import sum_of
from paceline.schema.codec import read_json, write_json
from paceline.schema.version import FILES, FORMAT, Serving, Version

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names of models and labels: they stand in addresses and in paths."""
LARGEST = 2**53
"""Of version numbers: above it JavaScript and other readers of JSON confuse them."""


def checked_name(name: str, what: str = "model") -> str:
    """A name that can stand in a path and in an address."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"the {what} name {shown(name)} must be letters, digits, '.', '_' and '-' (at most 100,"
            " a letter or digit first)"
        )
    return name


def version_numbers(folder: Path) -> list[int]:
    """Numbers of the versions in a model's folder, the newest last."""
    if not folder.is_dir():
        return []
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    found = [int(name) for name in names if re.fullmatch(r"[1-9]\d{0,15}", name)]
    return sorted(number for number in found if number <= LARGEST)


def read_version(folder: Path) -> Version:
    """What a version says of itself; ModelError where its files are not those it names."""
    try:
        version = read_json(Version, folder / "version.json")
    except PacelineError as error:
        raise ModelError(str(error)) from None
    if version.format != FORMAT:
        raise ModelError(f"{folder} has the format {version.format}, known here is {FORMAT}")
    if FILES[version.kind] not in version.files:
        raise ModelError(f"{folder}/version.json names no {FILES[version.kind]} among its files")
    for name, expected in version.files.items():
        # A name with a slash would lead out of the folder.
        if Path(name).name != name or (folder / name).is_symlink():
            raise ModelError(f"{folder}/version.json names {shown(name)}, which is no file of it")
        try:
            found = sum_of(folder / name)
        except OSError as error:
            raise ModelError(f"{folder / name} cannot be read: {error.strerror}") from None
        if found != expected:
            raise ModelError(
                f"{folder / name} is not what was exported (its checksum differs): export it again"
            )
    return version


def write_next(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Let `fill` write the files of a new version, and give it the next number."""
    checked_name(folder.name)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give a folder for versions, as models/NAME")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    except OSError as error:
        raise _cannot_write(folder, error) from None
    try:
        fill(partial)
        partial.chmod(0o755)
        for path in partial.iterdir():
            path.chmod(0o644)  # a server may be another user
            flush(path)
        flush(partial)
        return _renamed(folder, partial)
    except OSError as error:
        raise _cannot_write(folder, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _renamed(folder: Path, partial: Path) -> Path:
    while True:
        final = folder / str(max(version_numbers(folder), default=0) + 1)
        try:
            partial.rename(final)
        except OSError:
            if not final.exists():
                raise
            continue  # another export took the number
        flush(folder)
        return final


def _cannot_write(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"no new version could be written to {folder} ({error.strerror or error}); those that are"
        " there are as they were: free some room, or make it writable"
    )


def read_serving(folder: Path) -> Serving:
    """Which versions of a model are served; the usual rule where nobody has changed it."""
    path = folder / "serving.json"
    return read_json(Serving, path) if path.exists() else Serving()


def write_serving(folder: Path, serving: Serving) -> None:
    """Change which versions are served; a server that watches the folder follows."""
    try:
        write_json(folder / "serving.json", serving)
    except OSError as error:
        raise StorageError(
            f"{folder / 'serving.json'} cannot be written ({error.strerror})"
        ) from None


def served_numbers(serving: Serving, there: list[int]) -> list[int]:
    """The versions that are to be served, of those that are there.

    >>> served_numbers(Serving(labels={"stable": 1}), [1, 2, 3])
    [1, 3]
    """
    chosen = {
        "latest": there[-1:],
        "all": there,
        "specific": [number for number in there if number in serving.versions],
    }[serving.policy]
    labelled = {number for number in serving.labels.values() if number in there}
    return sorted({*chosen, *labelled})


def stable_before(serving: Serving, there: list[int]) -> int:
    """The version to go back to: the one before the stable one, or before the newest."""
    now = serving.labels.get("stable", there[-1] if there else 0)
    older = [number for number in there if number < now]
    if not older:
        raise ConfigError(f"there is no version before {now} to go back to")
    return older[-1]


def checked_folder(path: Path) -> Path:
    """A folder that holds versions of a model."""
    if not version_numbers(path):
        raise ConfigError(
            f"{path} holds no version of a model: `paceline export RUN --to {path}` makes one"
        )
    return path
