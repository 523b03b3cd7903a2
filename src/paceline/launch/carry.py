"""A host's way to bring what it writes to a launcher that cannot see its files.

The agent works in a folder of its own below the cache, `runs/<run>-<node>-<session>`. While
training goes on it brings what is new in there: metrics as their lines come, checkpoints that
`latest` and `best` point to, events of its ranks. What it has written stays until the launcher has
it: whatever ends the run, the folder is there for the next launcher of the run, which asks for it.

    file      to the launcher: a piece of a log, of a whole file or of a checkpoint; before a
              training is continued also to the agent
    carried   to the agent: it is written (the last piece of a checkpoint: all is there, and whole)
    brought   to the launcher: that was all
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import shown
from paceline.launch.channel import Channel, Message
from paceline.run import RunDirectory

PIECE = 2**16
"""Bytes of a file in one message: a heartbeat waits no longer than such a piece takes."""
WINDOW = 8
"""Pieces that may be on their way: over a slow link no message has more than these before it."""
LOOK_SECONDS = 1.0
"""Between two looks for what is new."""
REST = 9.0
"""Rest after a checkpoint, in times of what it took: at most a tenth of the time goes into them."""
STALLED_SECONDS = 5.0
"""An agent that is to leave waits no longer for word of what it has brought."""
LEAVING_SECONDS = 5.0
"""An agent that leaves tries no longer to remove its folder."""
RESULTS = ("run.json", "legs.jsonl", "plan.json")
LOGS = ("metrics.jsonl",)
OF_RANKS = ("events.jsonl", "output.log", "exit.json")
"""What every rank has of its own: of a training its events, of a script what it printed."""


def kept_folders(cache: Path, run: str) -> list[Path]:
    """What earlier agents of a run have left here and nobody works in, the newest last."""
    found = [path for path in (cache / "runs").glob(f"{run}-*") if not is_used(path)]
    return sorted(found, key=newest_update)


def newest_update(folder: Path) -> int:
    """Of the checkpoint that `latest` points to; 0 without one."""
    try:
        return int((folder / "checkpoints" / "latest").readlink().name.removeprefix("step-"))
    except (OSError, ValueError):
        return 0


def is_used(folder: Path) -> bool:
    """Whether an agent works in a folder."""
    try:
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@dataclass
class _Job:
    pieces: Generator[Message]
    done: Callable[[], None]
    refused: Callable[[], None]
    checkpoint: bool = False
    started: float = 0.0


class Bringing:
    """The agent's side: what of a folder the launcher does not have yet."""

    def __init__(
        self,
        channel: Channel,
        folder: Path,
        *,
        ranks: Sequence[int] = (),
        leads: bool = True,
        has: Iterable[str] = (),
    ) -> None:
        self.channel, self.folder = channel, folder
        self._leads = leads
        """Its ranks write what all share; the others' copies of that are older, and stay."""
        self.failed = False
        """The launcher could not take something, and time was up."""
        self._events = [f"rank-{rank}/{name}" for rank in ranks for name in OF_RANKS]
        self._finishing = False
        self._has: dict[str, tuple[int, int]] = {}
        """Inode and bytes of every file that the launcher has."""
        self._steps = set(has)
        """Checkpoints that the launcher has."""
        self._links: dict[str, str] = {}
        self._job: _Job | None = None
        self._on_their_way = 0
        self._looked = self._rest_until = self._resume_at = 0.0
        self._nothing_left = False
        self._heard = time.monotonic()

    # --- what the agent calls ------------------------------------------------------

    def finish(self) -> None:
        """Nothing more will be written here: bring the rest, without rests."""
        if not self._finishing:
            self._finishing, self._nothing_left = True, False
            self._looked = self._rest_until = self._resume_at = 0.0
            self._heard = time.monotonic()

    @property
    def is_done(self) -> bool:
        """Everything is brought, or was refused; known once `finish` was called."""
        return self._finishing and self._nothing_left and self._job is None

    @property
    def is_stalled(self) -> bool:
        """The launcher says nothing any more."""
        return time.monotonic() - self._heard > STALLED_SECONDS

    @property
    def is_complete(self) -> bool:
        """The launcher has all of it."""
        return self.is_done and not self.failed

    def hear(self, message: Message) -> None:
        """The launcher's word on one piece."""
        self._heard = time.monotonic()
        self._on_their_way -= 1
        job = self._job
        if job is not None and not message["taken"]:
            job.pieces.close()
            job.done = job.refused

    def turn(self) -> None:
        """Send what may go now; never waits."""
        while True:
            if self._job is None and not self._begin():
                return
            assert self._job is not None
            while self._on_their_way < WINDOW and not self.channel.is_waiting:
                try:
                    piece = next(self._job.pieces)
                except StopIteration:
                    break
                except OSError:  # it was removed before it could be read, or cannot be read at all
                    self._job.done = self._job.refused
                    break
                self._on_their_way += 1
                self.channel.send("file", **piece)
            else:
                return
            if self._on_their_way > 0:
                return
            job, self._job = self._job, None
            job.done()
            self._looked = 0.0
            if job.checkpoint:
                now = time.monotonic()
                self._rest_until = now + (0.0 if self._finishing else REST * (now - job.started))

    # --- what there is to bring ----------------------------------------------------

    def _begin(self) -> bool:
        now = time.monotonic()
        if self._nothing_left and self._finishing:
            return False
        if now - self._looked < LOOK_SECONDS or now < self._resume_at:
            return False
        self._looked = now
        self._job = self._next()
        self._nothing_left = self._job is None
        if self._job is not None:
            self._job.started = now
        return self._job is not None

    def _next(self) -> _Job | None:
        for name in self._events:
            if (job := self._log(name)) is not None:
                return job
        return self._next_shared() if self._leads else None

    def _next_shared(self) -> _Job | None:
        boards = [f"tensorboard/{path.name}" for path in self._entries("tensorboard")]
        for name in (*LOGS, *boards):
            if (job := self._log(name)) is not None:
                return job
        for name in RESULTS:
            if (job := self._whole(name)) is not None:
                return job
        links = self._present_links()
        for step in dict.fromkeys(links.values()):
            rests = time.monotonic() < self._rest_until
            if (
                step not in self._steps
                and not rests
                and (job := self._checkpoint(step)) is not None
            ):
                return job
        wanted = {name: step for name, step in links.items() if step in self._steps}
        if wanted != self._links:
            return _Job(
                iter_once({"links": wanted}),
                lambda: setattr(self, "_links", wanted),
                self._refused,
            )
        return None

    def _entries(self, name: str) -> list[Path]:
        try:
            return sorted((self.folder / name).iterdir())
        except OSError:
            return []

    def _present_links(self) -> dict[str, str]:
        found = {}
        for name in ("latest", "best"):
            with contextlib.suppress(OSError):
                found[name] = (self.folder / "checkpoints" / name).readlink().name
        return found

    def _log(self, name: str) -> _Job | None:
        """What a file has grown by; one that was replaced goes whole."""
        path = self.folder / name
        try:
            found = path.stat()
        except OSError:
            return None
        inode, had = self._has.get(name, (found.st_ino, 0))
        whole = name in LOGS and name not in self._has
        if whole or inode != found.st_ino or found.st_size < had:
            return self._whole(name)
        if found.st_size == had:
            return None
        with path.open("rb") as file:
            file.seek(had)
            data = file.read(PIECE)
        if name.endswith(".jsonl") and not self._finishing:
            data = data[: data.rfind(b"\n") + 1]
        if not data:
            return None
        end = (found.st_ino, had + len(data))
        piece = {"log": name, "at": had, "data": base64.b64encode(data).decode()}
        return _Job(
            iter_once(piece | {"sum": hashlib.sha256(data).hexdigest()}),
            lambda: self._has.__setitem__(name, end),
            lambda: self._refused(name),
        )

    def _whole(self, name: str) -> _Job | None:
        path = self.folder / name
        try:
            found = path.stat()
        except OSError:
            return None
        end = (found.st_ino, found.st_size)
        if self._has.get(name) == end:
            return None
        return _Job(
            _pieces(name, {"": path}, end[1]),
            lambda: self._has.__setitem__(name, end),
            self._refused,
        )

    def _checkpoint(self, step: str) -> _Job | None:
        unit = f"checkpoints/{step}"
        files = {path.name: path for path in self._entries(unit) if path.is_file()}
        if not files:
            return None
        return _Job(
            _pieces(unit, files), lambda: self._steps.add(step), self._refused, checkpoint=True
        )

    def _refused(self, name: str = "") -> None:
        """The launcher could not take it: later again, all of it, or never."""
        self._has.pop(name, None)
        self._resume_at = time.monotonic() + 10 * LOOK_SECONDS
        if self._finishing:
            self.failed = self._nothing_left = True


def iter_once(message: Message) -> Generator[Message]:
    """One message as the pieces of a job."""
    yield message


def _pieces(unit: str, paths: dict[str, Path], size: int | None = None) -> Generator[Message]:
    """Files that belong together; held open, so that who removes them meanwhile does no harm."""
    sums = {}
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(path.open("rb")) for name, path in paths.items()}
        for name, file in files.items():
            digest, at = hashlib.sha256(), 0
            while True:
                data = file.read(PIECE if size is None else min(PIECE, size - at))
                if data or at == 0:
                    digest.update(data)
                    text = base64.b64encode(data).decode()
                    yield {"unit": unit, "name": name, "at": at, "data": text}
                at += len(data)
                if len(data) < PIECE:
                    break
            sums[name] = digest.hexdigest()
    yield {"unit": unit, "sums": sums}


def to_go_on_from(run: Path) -> Generator[Message]:
    """What a host that cannot see a run must have of it to continue it, for its `Receiving`."""
    for name in ("metrics.jsonl", "legs.jsonl"):
        if (path := run / name).is_file():
            yield from _pieces(name, {"": path}, path.stat().st_size)
    latest = run / "checkpoints" / "latest"
    if latest.is_symlink():
        step = latest.readlink().name
        files = {path.name: path for path in sorted(latest.iterdir()) if path.is_file()}
        yield from _pieces(f"checkpoints/{step}", files)
        yield {"links": {"latest": step}}


class Carrier:
    """What an agent has to do with files: its own folder, what it brings, what others have left."""

    def __init__(self, channel: Channel, node: int) -> None:
        self.channel, self.node = channel, node
        self.folder: Path | None = None
        """Where this node works if it cannot see the launcher's run."""
        self._kept: list[Path] = []
        self._look: Callable[[], list[Path]] = list
        self._bringing: Bringing | None = None
        self._farewell: Callable[[], None] | None = None
        self._is_brought = True

    def settle(self, cache: Path, run: str, session: str) -> Path:
        """A folder of this node's own, and what earlier agents of the run have left."""
        self._look = functools.partial(kept_folders, cache, run)
        self._kept = self._look()
        self.folder = cache / "runs" / f"{run}-{self.node}-{session[:8]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        RunDirectory(self.folder).lock()  # until this process ends: nobody takes it for left
        return self.folder

    @property
    def newest_kept(self) -> dict[str, object] | None:
        """What the launcher may want to have brought."""
        if not self._kept:
            return None
        return {"folder": str(self._kept[-1]), "update": newest_update(self._kept[-1])}

    def bring(self, folder: str) -> None:
        """Bring what an earlier agent has left."""
        if folder not in map(str, self._kept):
            raise ValueError(f"{shown(folder)} is no folder that an agent of this run has left")
        self._bringing = Bringing(self.channel, Path(folder))
        self._bringing.finish()

    def forget(self, update: int) -> None:
        """Remove what was left and is no newer than that."""
        still = self._look()  # another agent that begins may have been seen before its lock
        for folder in self._kept:
            if folder in still and newest_update(folder) <= update:
                shutil.rmtree(folder, ignore_errors=True)

    def begin(self, ranks: Sequence[int]) -> None:
        """Bring what is written from now on."""
        if self.folder is not None:
            here = [path.name for path in (self.folder / "checkpoints").glob("step-*")]
            self._bringing = Bringing(
                self.channel, self.folder, ranks=ranks, leads=self.node == 0, has=here
            )
            self._is_brought = False

    def end(self, farewell: Callable[[], None] | None = None) -> None:
        """Nothing more is written; `farewell` comes when all of it is brought."""
        self._farewell = farewell
        if self._bringing is not None:
            self._bringing.finish()
        elif farewell is not None:
            farewell()

    def hear(self, message: Message) -> None:
        """The launcher's word on a piece."""
        if self._bringing is not None:
            self._bringing.hear(message)

    def turn(self) -> None:
        """Send what may go now; never waits."""
        bringing = self._bringing
        if bringing is None:
            return
        bringing.turn()
        if bringing.is_done:
            self._bringing = None
            self._is_brought = self._is_brought or bringing.is_complete
            self.channel.send("brought", complete=bringing.is_complete)
            if self._farewell is not None:
                self._farewell()

    @property
    def is_through(self) -> bool:
        """Nothing is left to bring, or nobody takes it."""
        return self._bringing is None or self._bringing.is_stalled

    def close(self) -> None:
        """Remove this node's folder; where the first one has what nobody else has, say where."""
        if self.folder is None:
            return
        if self._is_brought or self.node > 0:
            end = time.monotonic() + LEAVING_SECONDS
            while self.folder.exists() and time.monotonic() < end:
                # A rank that was just killed may have put a file there in the meantime.
                shutil.rmtree(self.folder, ignore_errors=True)
                time.sleep(0.01)
        else:
            print(f"paceline: what was trained here stays in {self.folder}", file=sys.stderr)
