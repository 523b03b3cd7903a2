"""A real training saves in the middle of an epoch when it is asked to, alone and in ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SETTINGS = (
    "workload.data=synthetic",
    "workload.model=mnist_cnn",
    "workload.batch_size=8",
    "data.options={ shape = [1, 28, 28], samples = 80000, test_samples = 8 }",
    "train.epochs=1",
)


@pytest.mark.parametrize("strategy", ["sequential", "processes"])
def test_a_checkpoint_is_written_when_it_is_asked_for(tmp_path: Path, strategy: str) -> None:
    run = tmp_path / "run"
    changes = [word for s in (*SETTINGS, f"local.strategy={strategy}") for word in ("--set", s)]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", "--run", str(run), *changes],
        stdout=subprocess.DEVNULL,
    )
    try:
        ends = time.monotonic() + 240
        asked = False
        while not list(run.glob("checkpoints/step-*")):
            assert process.poll() is None
            assert time.monotonic() < ends
            events = "".join(file.read_text() for file in run.glob("rank-*/events.jsonl"))
            if not asked and '"progress"' in events:
                (run / "requests" / "checkpoint").touch()
                asked = True
            time.sleep(0.05)
        assert asked
        while (run / "requests" / "checkpoint").exists():
            assert time.monotonic() < ends
            time.sleep(0.05)
        assert not (run / "metrics.jsonl").exists()  # the epoch is still under way
        (run / "requests" / "stop").touch()
        assert process.wait(240) == 143
        assert not (run / "requests").exists()
    finally:
        process.kill()
        process.wait()
