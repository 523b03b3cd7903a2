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

from paceline.bench.faults import LOOK_SECONDS, Cell, Outcome
from paceline.lab import Lab
from paceline.launch.agent import SAVE_SECONDS
from paceline.launch.collect import newest_here
from paceline.schema.events import Span, decode_line

STATED_SECONDS = SAVE_SECONDS
"""What docs/launching.md says: nothing of the training runs any longer after a kill."""
_CONTINUING = re.compile(r"continuing \S+ from update (\d+)")


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
        outcome.left = self.left(lab)
        reached, saved = self._reached(), newest_here(self.run_path)
        outcome.repeated = max(0, reached - saved)
        outcome.note = f"all ended {outcome.ended_seconds:.1f} s after it, and update {saved} was"
        outcome.note += f" saved of {reached}"
        if outcome.ended_seconds > STATED_SECONDS:
            outcome.note += f": later than the {STATED_SECONDS:.0f} s that are stated"
            return
        outcome.code = self._go_on(lab, saved)

    def _reached(self) -> int:
        """How many updates the training had done, by what its ranks have recorded."""
        reached = 0
        for path in self.run_path.glob("rank-*/events.jsonl"):
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(Exception):  # the last line of a rank that was killed
                    event = decode_line(line)
                    if isinstance(event, Span) and event.name == "optimizer":
                        reached = max(reached, (event.update or 0) + 1)
        return reached

    def _go_on(self, lab: Lab, saved: int) -> int | None:
        """What `--resume` ends with; None where it does not end, or goes on from elsewhere."""
        words = ["train", "--resume", "--run", str(self.run_path), "--hosts", "lab", "-v"]
        log = self.log.with_suffix(".resume.log")
        with log.open("wb") as output:
            process = lab.start(
                [sys.executable, "-m", "paceline.cli", *words, "--engine", self.how.engine],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"PACELINE_CACHE": str(self.cache)},
            )
            try:
                self.await_end(process)
            finally:
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
        outcome.left = list(dict.fromkeys([*left, *outcome.left]))
