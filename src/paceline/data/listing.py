"""Which image files a folder of class folders holds, and which of them can be used."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data.base import Skipped, fingerprint_of
from paceline.data.images import SUFFIXES, quick_check
from paceline.errors import DataError
from paceline.schema.plain import ONE_LINE, checked, read_json_file

TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("val", "valid", "validation", "test")
CHECK_VERSION = "1"


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """One file: its path below the folder, its class and part by number."""

    path: str
    label: int
    part: int
    """0: training; 1: testing; both 0 where the folder has no split."""
    size: int
    changed: int


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All image files of a folder, in an order that is the same everywhere."""

    folder: Path
    classes: tuple[str, ...]
    files: tuple[ImageFile, ...]
    split: bool
    other_files: int

    @property
    def fingerprint(self) -> str:
        """The same wherever the folder is copied to."""
        return fingerprint_of(f"{file.path}|{file.size}" for file in self.files)

    @property
    def cache_key(self) -> str:
        """Changes when any file changes in place."""
        stamps = (f"{file.path}|{file.size}|{file.changed}" for file in self.files)
        return fingerprint_of([str(self.folder.resolve()), *stamps])


def list_folder(folder: Path) -> Listing:
    """Find classes, parts and files; DataError where there is nothing to learn from."""
    parts = _parts(folder)
    by_part = [_class_folders(part) for part in parts]
    classes = tuple(sorted(by_part[0]))
    if not classes:
        raise DataError(
            f"{parts[0]} holds no class folders; put the images of each class into a folder of"
            " its own, such as cat/ and dog/"
        )
    if len(classes) == 1:
        raise DataError(
            f"{parts[0]} holds only the class {classes[0]!r}; telling classes apart needs two"
        )
    unknown = sorted(set().union(*by_part) - set(classes))
    if unknown:
        raise DataError(
            f"{parts[-1]} holds the class {unknown[0]!r}, which {parts[0]} does not have;"
            " use the same class folders on both sides"
        )
    files: list[ImageFile] = []
    others = 0
    for number, part in enumerate(parts):
        for label, name in enumerate(classes):
            found, ignored = _images_below(by_part[number].get(name), folder, label, number)
            others += ignored
            if not found and number == 0:
                raise DataError(
                    f"class folder {part / name} holds no image; add images or remove the folder"
                )
            files += found
    if len(parts) > 1 and not any(file.part == 1 for file in files):
        raise DataError(f"{parts[1]} holds no image; add images or remove the folder")
    return Listing(
        folder=folder,
        classes=classes,
        files=tuple(files),
        split=len(parts) > 1,
        other_files=others,
    )


def _parts(folder: Path) -> list[Path]:
    """The training and the test folder, or the folder itself where there is no split."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give a folder of class folders")
    train = [folder / name for name in TRAIN_NAMES if (folder / name).is_dir()]
    if not train:
        return [folder]
    test = [folder / name for name in TEST_NAMES if (folder / name).is_dir()]
    return [train[0], *test[:1]]


def _class_folders(part: Path) -> dict[str, Path]:
    try:
        with os.scandir(part) as entries:
            return {
                entry.name: Path(entry.path)
                for entry in entries
                if entry.is_dir() and not entry.name.startswith((".", "__"))
            }
    except OSError as error:
        raise DataError(f"{part} cannot be listed ({error.strerror}); check it") from error


def _images_below(
    place: Path | None, folder: Path, label: int, part: int
) -> tuple[list[ImageFile], int]:
    """Image files below a class folder, sorted by name, and how many others there are."""
    found: list[ImageFile] = []
    others = 0
    for parent, folders, names in os.walk(place) if place else ():
        folders.sort()
        for name in sorted(names):
            if name.startswith("."):
                continue
            path = Path(parent) / name
            if path.suffix.lower() not in SUFFIXES:
                others += 1
                continue
            try:
                stat = path.stat()
                size, changed = stat.st_size, stat.st_mtime_ns
            except OSError:
                size, changed = 0, 0  # A dangling link; the check of the files names it.
            found.append(
                ImageFile(
                    path=path.relative_to(folder).as_posix(),
                    label=label,
                    part=part,
                    size=size,
                    changed=changed,
                )
            )
    return found, others


def find_bad_files(
    listing: Listing,
    cache: Path,
    key: str,
    workers: int,
    check: Callable[[Path], str | None] = quick_check,
) -> tuple[Skipped, ...]:
    """Files that cannot be used, found once per machine and remembered in the cache folder.

    The first process checks (header and end of each file); others wait for it and read
    what it found, so that all of them count the same samples.
    """
    memory = cache / "checks" / f"{fingerprint_of([CHECK_VERSION, key])}.json"
    with _locked(memory.with_suffix(".lock")):
        with contextlib.suppress(OSError, ValueError):
            content = read_json_file(memory)
            shape = {"skipped": [[ONE_LINE]]}
            found = [Skipped(path=p, reason=r) for p, r in checked(content, shape)["skipped"]]
            if {one.path for one in found} <= {file.path for file in listing.files}:
                return tuple(found)
        with ThreadPoolExecutor(max(1, workers)) as pool:
            paths = (listing.folder / file.path for file in listing.files)
            reasons = list(pool.map(check, paths, chunksize=16))
        skipped = tuple(
            Skipped(path=file.path, reason=reason)
            for file, reason in zip(listing.files, reasons, strict=True)
            if reason
        )
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(dir=memory.parent, suffix=".part")
            with os.fdopen(descriptor, "w") as file:
                json.dump({"skipped": [[bad.path, bad.reason] for bad in skipped]}, file)
            Path(name).replace(memory)
        return skipped


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; no lock where nothing can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def usable(listing: Listing, skipped: tuple[Skipped, ...]) -> np.ndarray:
    """Numbers of the files that take part; DataError when a class has lost them all."""
    bad = {one.path: one.reason for one in skipped}
    good = np.array(
        [number for number, file in enumerate(listing.files) if file.path not in bad],
        dtype=np.int64,
    )
    have = {listing.files[number].label for number in good if listing.files[number].part == 0}
    for label, name in enumerate(listing.classes):
        if label not in have:
            example = next(file for file in listing.files if file.label == label)
            raise DataError(
                f"no image of class {name!r} can be used: {example.path}: {bad[example.path]};"
                " replace the files or remove the class"
            )
    if listing.split and not any(listing.files[number].part == 1 for number in good):
        raise DataError(f"no test image of {listing.folder} can be used; replace the files")
    return good
