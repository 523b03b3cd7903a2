"""Publishes every new best of a run as a version, while the training goes on.

    python -m paceline.serve.publish RUN MODELS/NAME FORMAT

runs beside the training with the lowest priority, so that the training loses as little as possible.
It ends when its input ends, after it has published the last best: so it never outlives whoever
started it. What cannot be published is said and costs the training nothing.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

LOOK_SECONDS = 1.0
"""Between two looks at the run."""
LOWEST = 19
"""Niceness: only what nobody else wants of the cores."""


class Publisher:
    """Knows which best weights were published already."""

    def __init__(self, run: Path, to: Path, kind: Any, say: Callable[[str], None]) -> None:
        self.run, self.to, self.kind, self.say = run, to, kind, say
        self.done: str | None = None

    def look(self) -> None:
        """Publish the best weights if they are new; one sentence where that fails."""
        newest = self._best()
        if newest is None or newest == self.done:
            return
        from paceline.serve.export import export
        from paceline.serve.trained import open_trained

        try:
            folder, version = export(open_trained(self.run, weights="best"), self.kind, self.to)
        except Exception as error:  # the training goes on, and the next best is tried
            if self._best() != newest:
                return  # a better one has taken its place meanwhile
            self.done = newest
            self.say(
                f"warning: update {newest.removeprefix('step-')} is not published: {_reason(error)}"
            )
            return
        self.done = f"step-{version.origin.update:08d}"
        accuracy = version.origin.metrics.get("test_accuracy")
        told = f" (test accuracy {accuracy:.2%})" if accuracy is not None else ""
        self.say(f"published {folder}{told}")

    def _best(self) -> str | None:
        try:
            return (self.run / "checkpoints" / "best").readlink().name
        except OSError:
            return None


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"


def main(words: list[str]) -> None:
    """Look at the run until the input ends, and once more."""
    run, to, kind = Path(words[0]), Path(words[1]), words[2]
    os.nice(LOWEST)
    publisher = Publisher(run, to, kind, lambda text: print(text, flush=True))
    while True:
        ended = bool(select.select([sys.stdin], [], [], LOOK_SECONDS)[0])
        publisher.look()
        if ended:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
