"""The run directory: everything that one training did, in files a person can read."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from paceline.errors import RunDirectoryError, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EIO)
_BEGINNING = re.compile(
    r"(config\.toml|(plan|proof|machines|race|race-[^/]+)\.json|(legs|metrics)\.jsonl|\.lock|\.id"
    r"|\.launch|tensorboard|requests|checkpoints|(rank|node)-\d+|\.[^/]*\.partial)"
)
"""Names of what a run has before its first evaluation."""


class RunDirectory:
    """Paths inside a run, and the lock that keeps a second training out of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._undo: Callable[[], None] | None = None
        self._before: dict[Path, str | None] = {}
        self._newest: str | None = None

    @property
    def is_new(self) -> bool:
        """It was made for this training, not opened to go on with."""
        return self._undo is not None

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def machines(self) -> Path:
        return self.path / "machines.json"

    @property
    def race(self) -> Path:
        return self.path / "race.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def legs(self) -> Path:
        return self.path / "legs.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        return self.path / "run.json"

    @property
    def requests(self) -> Path:
        """Where a training that runs looks for wishes: a file each (`schema.requests`)."""
        return self.path / "requests"

    def rank(self, rank: int) -> Path:
        """What one rank wrote."""
        return self.path / f"rank-{rank}"

    def lock(self) -> None:
        """Refuse a second training in the same directory while one is running."""
        if self._lock is not None:
            return
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise RunDirectoryError(
                f"{self.path} is in use by another training: wait for it or choose another --run"
            ) from None
        self._lock = descriptor

    def unlock(self) -> None:
        """Let others in again."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Say in a sentence what the disk that the run lies on refuses."""
        try:
            yield
        except OSError as error:
            place = Path(str(error.filename)) if error.filename else self.path
            inside = place.is_relative_to(self.path) or place.is_relative_to(self.path.resolve())
            if error.errno in _FULL or (error.errno in _CLOSED and inside):
                raise StorageError(
                    f"{place} cannot be written ({error.strerror}): free some room or make it"
                    " writable, or choose another --run"
                ) from None
            raise

    def remember(self) -> None:
        """Note what is here, so that `discard` can leave an opened run as it was."""
        files = (self.config, self.plan, self.race)
        self._before = {file: file.read_text() if file.exists() else None for file in files}
        self._newest = self._latest()

    def discard(self) -> None:
        """Take back what a mistake of the user ended before it trained.

        A new run is removed: its name is then free for the next try. One that was opened says again
        what it said before. A run that has trained since is left as it is.
        """
        if self._undo is not None:
            if not self.metrics.exists() and not self.checkpoints.exists():
                self._undo()
                self._undo = None
        elif self._latest() == self._newest:
            for file, text in self._before.items():
                if text is None:
                    file.unlink(missing_ok=True)
                elif file.read_text() != text:
                    write_whole(file, text)

    def _latest(self) -> str | None:
        latest = self.checkpoints / "latest"
        return latest.readlink().name if latest.is_symlink() else None


def create_run(name: str, where: Path | None = None, root: Path = Path("runs")) -> RunDirectory:
    """A new run directory: `runs/<time>-<name>`, or `where`; `runs/latest` points to it."""
    latest = root / "latest"
    before = latest.readlink().name if where is None and latest.is_symlink() else None
    try:
        if where is None:
            path = _new_path(root, name)
        else:
            path = where
            if is_only_begun(path):
                return _begin_again(path)
            if path.exists() and (not path.is_dir() or _has_files(path)):
                raise RunDirectoryError(
                    f"{path} exists and is not empty: continue it with --resume, or choose another"
                    " --run"
                )
            path.mkdir(parents=True, exist_ok=True)
        if where is None:
            point(root / "latest", path.name)
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory {where or root} cannot be made: {error.strerror}"
        ) from None

    def undo() -> None:
        shutil.rmtree(path, ignore_errors=True)
        if where is None:
            with contextlib.suppress(OSError):
                latest.unlink() if before is None else point(root / "latest", before)

    run = RunDirectory(path)
    run._undo = undo
    return run


def is_only_begun(path: Path) -> bool:
    """True for a run that was ended before it had anything to lose: a checkpoint or an evaluation.

    Everything in it is what beginning it writes; with a file of anybody else's it is none.
    """
    if not (path / "config.toml").is_file():
        return False
    names = [entry.name for entry in path.iterdir()]
    if not all(_BEGINNING.fullmatch(name) for name in names):
        return False
    metrics, checkpoints = path / "metrics.jsonl", path / "checkpoints"
    is_evaluated = metrics.exists() and metrics.stat().st_size > 0
    return not is_evaluated and not (checkpoints.is_dir() and any(checkpoints.glob("[!.]*")))


def _begin_again(path: Path) -> RunDirectory:
    """An empty run directory, locked, in place of one that was only begun."""
    run = RunDirectory(path)
    run.lock()
    kept = {file: file.read_bytes() for file in (run.config, run.plan) if file.is_file()}
    _clear(path)

    def undo() -> None:
        """As it was: what it was to be is not lost with a try that was refused."""
        _clear(path)
        for file, content in kept.items():
            file.write_bytes(content)

    run._undo = undo
    return run


def _clear(path: Path) -> None:
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != ".lock":
            entry.unlink(missing_ok=True)


def _has_files(path: Path) -> bool:
    """True when a folder holds more than the lock of a run that was killed as it began."""
    return any(entry.name != ".lock" for entry in path.iterdir())


def write_whole(file: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(link: Path, target: str) -> None:
    """Let a link point elsewhere; it is never missing."""
    partial = link.with_name(f".{link.name}-{os.getpid()}")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    partial.replace(link)


def open_run(path: Path) -> RunDirectory:
    """An existing run directory."""
    if not path.is_dir():
        raise RunDirectoryError(f"there is no run directory {path}: `paceline runs` lists them")
    return RunDirectory(path.resolve())


def _new_path(root: Path, name: str) -> Path:
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or "run"
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    root.mkdir(parents=True, exist_ok=True)
    for attempt in range(1000):
        suffix = f"-{attempt + 1}" if attempt else ""
        path = root / f"{stamp}-{slug}{suffix}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise RunDirectoryError(f"{root} already has a thousand runs called {stamp}-{slug}")
