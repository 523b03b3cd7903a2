"""A cell whose launcher is killed: the training saves and ends by itself, and goes on when asked.

Nobody is there to say that it went on, so it is looked at from outside: how long anything of it
still runs, which update had been reached, which one was saved, and what `--resume` makes of that.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.lab.faults import LOOK_SECONDS, Cell, Outcome
from paceline.lab import Lab
from paceline.launch.agent import SAVE_SECONDS, STOP_UPDATES
from paceline.launch.collect import newest_here
from paceline.launch.session import END_SECONDS
from paceline.schema.events import Span, decode_line

TIMED = 5
"""Updates before the kill that tell what one takes."""
_CONTINUING = re.compile(r"(?:continuing \S+ from update|is finished after) (\d+)")


class Deserted(Cell):
    """One training whose launcher is killed, and the one that goes on from there."""

    def after(self, lab: Lab, outcome: Outcome) -> None:
        """Wait until all have ended by themselves, and go on."""
        if not outcome.is_hit:
            return
        outcome.code = None
        while (now := time.monotonic()) < self.broken_at + self.end_seconds:
            if not self.running(lab):
                outcome.ended_seconds = now - self.broken_at
                break
            time.sleep(LOOK_SECONDS)
        else:
            return
        outcome.left = tuple(self.left(lab))
        done, saved = self._done(), newest_here(self.run_path)
        reached = max(done, default=0)
        outcome.repeated = max(0, reached - saved)
        stated = self._stated_seconds(done)
        outcome.note = f"all ended {outcome.ended_seconds:.1f} s after it, and update {saved} was"
        outcome.note += f" saved of {reached}"
        if outcome.ended_seconds > stated:
            outcome.note += f": later than the {stated:.1f} s that are stated"
            return
        outcome.code = self.go_on(lab, saved)

    def _done(self) -> dict[int, float]:
        """When (time.time()) any rank was first through with each update, as they recorded it."""
        done: dict[int, float] = {}
        for path in self.run_path.glob("rank-*/events.jsonl"):
            for line in path.read_text(errors="replace").splitlines():
                event = decode_line(line)
                if isinstance(event, Span) and event.name == "optimizer":
                    number = (event.update or 0) + 1
                    done[number] = min(event.end, done.get(number, event.end))
        return done

    def _stated_seconds(self, done: Mapping[int, float]) -> float:
        """In which docs/launching.md says that all is over: to stop, to save, to end."""
        ends = [end for _, end in sorted(done.items()) if end <= self.broken_time][-TIMED - 1 :]
        update = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else 0.0
        return SAVE_SECONDS + STOP_UPDATES * update + END_SECONDS

    def go_on(self, lab: Lab, saved: int) -> int | None:
        """What `--resume` ends with; None where it does not end, or goes on from elsewhere."""
        words = ["train", "--resume", "--run", str(self.run_path), "--hosts", self.hosts, "-v"]
        log = self.log.with_suffix(".resume.log")
        with log.open("wb") as output:
            process = lab.start(
                [sys.executable, "-m", "paceline.cli", *words, "--engine", self.how.engine],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"PACELINE_CACHE": str(self.cache)},
            )
            with contextlib.suppress(TimeoutError):
                self.await_end(process)
            code = process.poll()
            if code is None:
                process.kill()
                process.wait(30)
            process.close()
        told = _CONTINUING.search(log.read_text(errors="replace"))
        return code if told is not None and int(told[1]) == saved else None

    def judge(self, lab: Lab, outcome: Outcome, expected: Mapping[str, Any]) -> None:
        """Seconds are those until `--resume` could begin; what stays is looked for twice."""
        left, repeated, note = outcome.left, outcome.repeated, outcome.note
        super().judge(lab, outcome, expected)
        outcome.seconds, outcome.repeated, outcome.note = outcome.ended_seconds, repeated, note
        outcome.left = tuple(dict.fromkeys([*left, *outcome.left]))
