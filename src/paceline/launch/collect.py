"""What agents bring (see `carry`), from the launcher's side: written, found again, said.

Before a training is continued, agents write in the same way what the launcher sends them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import RunDirectoryError, StorageError, shortened, shown
from paceline.launch.channel import Message
from paceline.run import flush, point
from paceline.schema.checkpoint import checkpoints_in, update_of
from paceline.schema.config import Train
from paceline.schema.plain import ONE_LINE, checked, parse_toml, read_json_file, read_text

if TYPE_CHECKING:
    from paceline.launch.session import Session

IDENTITY = ".id"
"""File in the run directory: how hosts call the run whose files they keep."""
AWAY = ".away.json"
"""File in the run directory while a host keeps what may be newer than what is here."""
_STEP = re.compile(r"step-\d{8,}")
_LOG = re.compile(
    r"metrics\.jsonl|rank-\d+/(events\.jsonl|output\.log|exit\.json)|tensorboard/events\.[\w.\-]+"
)
_UNIT = re.compile(r"metrics\.jsonl|legs\.jsonl|run\.json|plan\.json|checkpoints/step-\d{8,}")
_NAME = re.compile(r"|\w[\w\-]*(\.\w[\w\-]*)*")
_LOG_FIELDS = {"log": ONE_LINE, "at": int, "data": str, "sum": ONE_LINE}
_PIECE_FIELDS = {"unit": ONE_LINE, "name": ONE_LINE, "at": int, "data": str}
_UNIT_FIELDS = {"unit": ONE_LINE, "sums": {"*": ONE_LINE}}
_LINK_FIELDS = {"links": {"latest?": ONE_LINE, "best?": ONE_LINE}}


class Receiving:
    """Writes what agents bring into the run, whole or not at all; nothing outside of it."""

    def __init__(self, run: Path, *, keep: int = 1, say: Callable[[str], None] = print) -> None:
        self.run, self._keep, self._say = run, keep, say
        self._complained = ""
        self._digests: dict[Path, hashlib._Hash] = {}
        self._before = {
            str(path.relative_to(run)): path.stat().st_size
            for path in run.glob("rank-*/events.jsonl")
        }
        """What the run had seen before: hosts that share no files send what comes after it."""

    def write(self, message: Message) -> None:
        """Put a piece where it belongs; ValueError for what belongs nowhere, or is damaged."""
        if "links" in message:
            self._link(checked(message, _LINK_FIELDS)["links"])
        elif "log" in message:
            self._append(message["log"], checked(message, _LOG_FIELDS))
        elif "sums" in message:
            self._install(checked(message, _UNIT_FIELDS)["unit"], message["sums"])
        else:
            self._add(checked(message, _PIECE_FIELDS)["unit"], message)

    def take(self, message: Message) -> bool:
        """Whether a piece is now where it belongs."""
        try:
            self.write(message)
        except (OSError, ValueError) as error:
            words: object = error
            if isinstance(error, OSError):  # of a file that is open it says no name
                words = f"{error.strerror}: {error.filename or self.run}"
            why = shortened(str(words))
            if why != self._complained:
                self._complained = why
                self._say(f"warning: what a host brings cannot be kept here: {why}")
            return False
        return True

    def _append(self, name: str, message: Message) -> None:
        _check(_LOG, name)
        data = _decoded(message["data"], name)
        if hashlib.sha256(data).hexdigest() != message["sum"]:
            raise ValueError(f"{name} came damaged")
        path = self.run / name
        path.parent.mkdir(exist_ok=True)
        at = message["at"] + self._before.get(name, 0)
        size = path.stat().st_size if path.exists() else 0
        if not 0 <= at <= size:
            raise ValueError(f"{name} has {size} bytes, and what came belongs behind {at}")
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(at)
            file.write(data)

    def _partial(self, unit: str) -> Path:
        """Where a unit grows; the name is one that trainings sweep away when it is left over."""
        place = self.run / _check(_UNIT, unit)
        return place.with_name(f".partial-{place.name}")

    def _add(self, unit: str, message: Message) -> None:
        partial, name = self._partial(unit), _check(_NAME, message["name"])
        path = partial / name if name else partial
        at = message["at"]
        data = _decoded(message["data"], unit)
        if at == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._digests[path] = hashlib.sha256()
        elif path not in self._digests:
            raise ValueError(f"pieces of {unit} are missing")
        with path.open("wb" if at == 0 else "r+b") as file:
            if file.seek(0, os.SEEK_END) != at:
                raise ValueError(f"pieces of {unit} are missing")
            file.write(data)
        self._digests[path].update(data)

    def _install(self, unit: str, sums: dict[str, str]) -> None:
        partial, final = self._partial(unit), self.run / unit
        for name, expected in sums.items():
            path = partial / name if _check(_NAME, name) else partial
            digest = self._digests.pop(path, None)
            if digest is None:
                raise ValueError(f"{name or 'the file'} of {unit} did not come")
            if digest.hexdigest() != expected:
                raise ValueError(f"{unit} came damaged")
            flush(path)
        if partial.is_dir():
            for path in partial.iterdir():
                if path.name not in sums:  # of a try that was given up
                    path.unlink()
            shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)

    def _link(self, links: dict[str, str]) -> None:
        folder = self.run / "checkpoints"
        for name in ("latest", "best"):
            if links.get(name) and (folder / _check(_STEP, links[name])).is_dir():
                point(folder / name, links[name])
        steps = sorted(
            (path for path in folder.iterdir() if _STEP.fullmatch(path.name)),
            key=lambda path: int(path.name.removeprefix("step-")),
        )
        pointed = {
            p.readlink().name for p in (folder / "latest", folder / "best") if p.is_symlink()
        }
        for path in steps[: -self._keep]:
            if path.name not in pointed:
                # Out of sight first: a kill in the middle must not leave half a checkpoint.
                hidden = path.with_name(f".partial-{path.name}")
                path.rename(hidden)
                shutil.rmtree(hidden, ignore_errors=True)


def _decoded(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError(f"{name} came damaged") from None


def _check(pattern: re.Pattern[str], name: str) -> str:
    if pattern.fullmatch(name) is None:
        raise ValueError(f"{shown(name)} is nothing that belongs into a run")
    return name


class Collecting:
    """Everything that comes from hosts that share no files, over a session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.run = session.order.run.path
        self._away = self.run / AWAY
        keep = parse_toml(session.order.config).get("train", {}).get("keep", Train().keep)
        self._receiving = Receiving(self.run, keep=int(keep), say=session.order.say)
        self.heard = 0.0
        """When something was last brought."""

    def hear(self, node: int, message: Message) -> bool:
        """Take what a node brings; False: the message is for others."""
        if message["kind"] == "file":
            taken = self._receiving.take(message)
            self.session.control.send(node, "carried", taken=taken)
            self.heard = time.monotonic()
            return True
        if message["kind"] == "brought" and node == 0 and message["complete"]:
            self._away.unlink(missing_ok=True)
        return False

    def fetch(self) -> None:
        """Bring here what a host has kept of an earlier session and is newer; then let all go."""
        session = self.session
        kept = {node: message.get("kept") or {} for node, message in session.ready.items()}
        node = max(kept, key=lambda node: kept[node].get("update", 0), default=0)
        update = kept.get(node, {}).get("update", 0)
        if update > newest_here(self.run):
            host = session.places[node].host.name
            session.order.say(
                f"host {host} has kept the checkpoint of update {update}: bringing it"
            )
            session.control.send(node, "bring", folder=kept[node]["folder"])
            answer = session.await_all("brought", "bringing what it kept", None, nodes={node})[node]
            if not answer["complete"]:
                raise RunDirectoryError(
                    f"the checkpoint of update {update} that host {host} keeps in"
                    f" {kept[node]['folder']} could not be brought to {self.run}: see above"
                )
        newest = newest_here(self.run)
        self._check(newest)
        session.control.tell("forget", update=newest)

    def _check(self, newest: int) -> None:
        """A run that is continued has something to go on from, and it is the newest there is."""
        order = self.session.order
        away = self._read_away()
        absent = away and away["host"] not in {p.host.name for p in self.session.places}
        where = f"host {away['host']} may keep a newer one in {away['folder']}" if absent else ""
        if order.continues and not newest:
            raise RunDirectoryError(
                f"{self.run} has no checkpoint to continue from, here or on its hosts"
                f"{'; ' + where + ': name that host too' if where else ''}; to train it from the"
                f" start use `paceline train {order.run.config}` with a new --run"
            )
        if where:
            order.say(f"warning: going on from the checkpoint of update {newest}; {where}")

    def _read_away(self) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError):
            found = read_json_file(self._away)
            return dict(checked(found, {"host": ONE_LINE, "folder": ONE_LINE}))
        return {}

    def begin(self) -> None:
        """Note where the first node, which writes what all share, keeps it meanwhile."""
        ready = self.session.ready.get(0, {})
        if not ready.get("shared", True):
            note = {"host": self.session.places[0].host.name, "folder": ready.get("folder", "")}
            self._away.write_text(json.dumps(note))
        else:
            self._away.unlink(missing_ok=True)

    def check_all_came(self) -> None:
        """A training that ended well is of no use while its results lie elsewhere."""
        if away := self._read_away():
            raise StorageError(
                f"training ended, but what host {away['host']} wrote could not all be brought to"
                f" {self.run}: free some room there"
            )

    def say_what_stays(self) -> None:
        """At the end: what could not be brought is not lost."""
        if self.session.training and (away := self._read_away()):
            self.session.order.say(
                f"what host {away['host']} wrote last stays there in {away['folder']} until"
                " --resume with that host brings it"
            )


def run_identity(run: Path) -> str:
    """The same for a run in all its sessions."""
    path = run / IDENTITY
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    try:
        found = read_text(path).strip()
    except ValueError:
        found = ""
    if re.fullmatch(r"[0-9a-f]{16}", found) is None:
        raise RunDirectoryError(f"{path} is damaged: remove it")
    return found


def newest_here(run: Path) -> int:
    """The update of the newest checkpoint of a run; 0 without one."""
    found = checkpoints_in(run / "checkpoints")
    return max((update_of(path) for path in found if (path / "state.json").is_file()), default=0)
