"""Small real trainings for the fault tests, and a model that is as slow as it is told."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paced_model import put_into

from paceline.schema.checkpoint import checkpoints_in

# Ten updates an epoch of a network that takes milliseconds: faults, not arithmetic, take the time.
SMALL = {
    "workload.model": "shallow_cnn",
    "workload.data": "synthetic",  # computed, not read: starts soonest
    "workload.batch_size": 16,
    "data.options.shape": [1, 28, 28],
    "data.options.samples": 156,  # the last batch is smaller
    "data.options.test_samples": 32,
    "train.epochs": 4,
    "train.checkpoint_every": 3,
    "train.keep": 2,
    "numerics.precision": "fp32",
    "local.strategy": "threads",
    "local.threads": 1,  # several would spin for each other's cores on a busy machine
}

STRATEGIES: dict[str, dict[str, object]] = {
    "threads": {"local__strategy": "threads"},
    "processes": {"local__strategy": "processes", "local__processes": 2},
}


class Training:
    """A training in a run directory, and what it left there."""

    def __init__(self, run: Path, **changes: Any) -> None:
        self.run = run
        settings = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
        self.begin = ["train", "--run", str(run)]
        for key, value in settings.items():
            self.begin += ["--set", f"{key}={value}"]
        self.resume = ["train", "--resume", "--run", str(run)]

    @property
    def arguments(self) -> list[str]:
        """What goes on with the run, or begins it anew when there is nothing to go on with."""
        if checkpoints_in(self.run / "checkpoints"):
            return self.resume
        shutil.rmtree(self.run, ignore_errors=True)
        return self.begin

    def weights(self) -> str:
        """Fingerprint of the last weights, bit for bit."""
        newest = self.run / "checkpoints" / "latest" / "model.safetensors"
        return hashlib.sha256(newest.read_bytes()).hexdigest()

    def lines(self) -> list[dict[str, Any]]:
        text = (self.run / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def wait_for(
        self,
        condition: Callable[[], bool],
        process: subprocess.Popen[str] | None = None,
        seconds: float = 300.0,
    ) -> None:
        """Until the condition holds; a process that ends before that fails the test."""
        end = time.monotonic() + seconds
        while not condition():
            if process is not None and process.poll() is not None and not condition():
                raise AssertionError(f"the training ended: {process.communicate()}")
            assert time.monotonic() < end, "the training did not get there"
            time.sleep(0.005)

    def has_checkpoint(self) -> bool:
        return (self.run / "checkpoints" / "latest").exists()

    def wait_for_checkpoint(self, process: subprocess.Popen[str], after: int = 0) -> None:
        """Until there is a checkpoint of more than `after` updates."""
        self.wait_for(lambda: self.has_checkpoint() and self.position() > after, process)

    def position(self) -> int:
        """Updates done when the newest checkpoint was written."""
        newest = (self.run / "checkpoints" / "latest").readlink().name
        return int(newest.removeprefix("step-"))


class PacedTraining(Training):
    """A training whose updates take as long as the test wants.

    The model writes beside itself: on a full disk not into the run's folder.
    """

    def __init__(
        self, run: Path, *, pace: float | None = None, folder: Path | None = None, **changes: Any
    ) -> None:
        folder = folder or run.parent
        model = {"workload__model": put_into(folder)}
        super().__init__(run, **(model | changes))
        self._pace = folder / "pace"
        self.asleep = folder / "asleep"
        self.set_pace(pace)

    def set_pace(self, seconds: float | None) -> None:
        """Seconds of every update from now on; None for as fast as it goes."""
        if seconds is None:
            self._pace.unlink(missing_ok=True)
        else:
            self._pace.write_text(str(seconds))

    def sleeps(self, seconds: float) -> bool:
        """Whether an update of that pace has begun."""
        return self.asleep.exists() and self.asleep.read_text() == str(seconds)
