"""A cell whose disk fills up: the training ends at the first checkpoint that is lost, and says so.

Two disks can: that of the run, where the launcher and the first node see the same files, and that
of a first node which sees no file of the launcher's and keeps what it writes until it is brought.
There, that of the launcher alone costs a warning, and the run fails at its end: nothing is lost.
Once there is room again, `--resume` goes on from the newest checkpoint that was written.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.lab.deserted import Deserted
from benchmarks.lab.faults import HOSTS, Outcome
from paceline.lab import Lab
from paceline.launch.collect import newest_here
from paceline.schema.checkpoint import update_of

ROOM = "24m"
"""Of the small disk: some dozens of checkpoints of the sleeping model."""
_SAID = re.compile(
    r"^paceline: .* (?:could not|cannot) be written .*No space left on device.*$", re.M
)
"""Of a checkpoint, or of what is written between two of them."""
_NOT_BROUGHT = re.compile(
    r"warning: what a host brings cannot be kept here: No space left on device.*"
    r"^paceline: training ended, but what host b wrote could not all be brought to .*: free some"
    r" room there$",
    re.M | re.S,
)
_FILL = 'while :; do cat /dev/zero >> "$1" 2> /dev/null; sleep 0.02; done'
"""What others free is taken again, too."""


class Full(Deserted):
    """One training on a disk that fills up, and the one that goes on once there is room."""

    host = HOSTS[0]
    """Whose disk it is."""
    said = _SAID

    def __init__(self, folder: Path, kind: str, fault: str) -> None:
        super().__init__(folder, kind, fault)
        self.disk = self.run_path
        self.kept = self.disk.with_name(f"{self.disk.name}-kept")
        self.run_path = self.disk / "run"
        self.filler = self.disk / "filler"

    def run(self, expected: Mapping[str, Any]) -> Outcome:
        """The training and how it ended; what the run was is kept when its disk has gone."""
        for path in (self.disk, self.kept):  # of a try before this one
            shutil.rmtree(path, ignore_errors=True)
        self.disk.mkdir()
        with self.small_disk():
            try:
                return super().run(expected)
            finally:
                self.filler.unlink(missing_ok=True)
                if self.run_path.is_dir():
                    shutil.copytree(self.run_path, self.kept, symlinks=True)

    @contextlib.contextmanager
    def small_disk(self) -> Iterator[None]:
        """Its own file system for the run, as all hosts see it."""
        subprocess.run(self.mount(), check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", str(self.disk)], check=True)

    def mount(self) -> list[str]:
        return ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(self.disk)]

    def is_ready(self) -> bool:
        """There must be something to go on from."""
        return super().is_ready() and newest_here(self.run_path) > 0

    def act(self, lab: Lab) -> None:
        """Fill it, and keep it full."""
        words = ["sh", "-c", _FILL, "fill-the-disk", str(self.filler)]
        quiet = subprocess.DEVNULL
        lab.start(words, on=self.host, stdin=quiet, stdout=quiet, stderr=quiet)

    def after(self, lab: Lab, outcome: Outcome) -> None:
        """Look at what was said, make room, and go on."""
        if not outcome.is_hit:
            return
        lab.signal(self.host, signal.SIGKILL, "fill-the-disk")
        lab.run(["rm", "-f", str(self.filler)], on=self.host, check=True)
        ended, outcome.code = outcome.code, None
        if ended is None:
            return
        outcome.ended_seconds = self.ended_after
        text = self.log.read_text(errors="replace")
        outcome.left = tuple(self.left(lab))
        saved = self.newest(lab)
        outcome.note = f"ended with {ended} {self.ended_after:.1f} s after it"
        if ended != 1 or len(self.said.findall(text)) != 1:
            outcome.note += ", WITHOUT THE SENTENCE"
        elif "Traceback" in text or "; starting again from update" in text:
            outcome.note += ", with more than a sentence"
        else:
            outcome.note += f", update {saved} was saved"
            outcome.code = self.go_on(lab, saved)

    def newest(self, lab: Lab) -> int:
        """The update of the newest whole checkpoint, wherever it is."""
        return newest_here(self.run_path)


class NodesFull(Full):
    """The launcher is on another host than the node that writes, and they share no files."""

    host = HOSTS[1]

    def __init__(self, folder: Path, kind: str, fault: str) -> None:
        super().__init__(folder, kind, fault)
        self.cache = self.disk / "cache"
        self.hosts = ",".join((*HOSTS[1:], HOSTS[0]))

    @contextlib.contextmanager
    def small_disk(self) -> Iterator[None]:
        """The launcher's disk is large; what hides it from the others is small."""
        yield

    def prepare(self, lab: Lab) -> None:
        for host in HOSTS[1:]:
            lab.run(self.mount(), on=host, check=True)

    def newest(self, lab: Lab) -> int:
        """Also what the first node has not brought yet."""
        script = f"ls -d {self.cache}/runs/*/checkpoints/step-*"
        found = lab.run(["sh", "-c", script], on=HOSTS[1], capture_output=True).stdout.split()
        updates = [update_of(Path(path.decode())) for path in found]
        return max([*updates, super().newest(lab)])


class LaunchersFull(NodesFull):
    """The launcher's disk fills up; the node that writes keeps all until it can be brought."""

    host = HOSTS[0]
    said = _NOT_BROUGHT
    small_disk = Full.small_disk
