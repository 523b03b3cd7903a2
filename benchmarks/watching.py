"""What watching a training costs, by direct count.

    python -m benchmarks.watching [--seconds 60]

A real training (the embedded default, made long) with its page beside it, and one viewer who reads
the events as a browser does. Counted are the CPU seconds of the watcher and of the training, and
what the training itself does to be watched: a tuple for every update, a line and two looks for
wishes every second. It does that whether anybody watches or not. The wall clock is not compared.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil

from paceline.observe.recorder import make_recorder
from paceline.run import RunDirectory
from paceline.schema import RankContext
from paceline.schema.events import Progress, encode_line
from paceline.schema.requests import CHECKPOINT, SETTINGS, STOP, taken_by

CALLS = 100_000
BAR = 0.01
"""Of the throughput of a training that uses all cores."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0)
    seconds = options.parse_args().seconds
    with tempfile.TemporaryDirectory(prefix="watching-") as name:
        watched(Path(name), seconds)
        counted(Path(name))


def watched(folder: Path, seconds: float) -> None:
    """Start a training and its page, view it, and count CPU seconds of both."""
    words = ["train", "--run", str(folder / "run"), "--watch", "--set", "train.epochs=100000"]
    training = subprocess.Popen(
        [sys.executable, "-u", "-m", "paceline", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PACELINE_CACHE": str(folder / "cache")},
    )
    try:
        assert training.stdout is not None
        address = next(
            found[1]
            for line in training.stdout
            if (found := re.search(r"watching on (http://\S+)", line))
        )
        threading.Thread(target=training.stdout.read, daemon=True).start()
        viewer = threading.Thread(target=view, args=(f"{address}/api/events",), daemon=True)
        viewer.start()
        time.sleep(15)  # start-up is over and the past is read
        family = [psutil.Process(training.pid), *psutil.Process(training.pid).children(True)]
        watchers = [each for each in family if "watch" in each.cmdline()]
        assert len(watchers) == 1
        others = [each for each in family if each not in watchers]
        before = [cpu(watchers), cpu(others), time.perf_counter()]
        time.sleep(seconds)
        watcher, trained, passed = (
            after - first
            for after, first in zip(
                (cpu(watchers), cpu(others), time.perf_counter()), before, strict=True
            )
        )
    finally:
        training.send_signal(signal.SIGTERM)
        training.wait(300)
    cores = len(os.sched_getaffinity(0))
    print(
        f"{passed:.0f} s watched: watcher {watcher:.2f} CPU s, {1000 * watcher / passed:.1f} ms a"
        f" second; training {trained:.1f} CPU s, {100 * trained / passed / cores:.0f}% of {cores}"
        " cores"
    )
    # A training that other programs leave little to is not slowed down more by a watcher that
    # does the same: what it can lose is the watcher's part of the cores.
    part = watcher / passed / cores
    print(
        f"at most {part:.2%} of what a training can have: bar {BAR:.0%}"
        f" {'held' if part <= BAR else 'MISSED'} (watcher / training: {watcher / trained:.2%})"
    )


def view(address: str) -> None:
    """Read what a page would get until it ends."""
    with urllib.request.urlopen(address) as answer:
        while answer.read1(1 << 16):
            pass


def cpu(processes: list[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes if each.is_running())


def counted(folder: Path) -> None:
    """What the training does for it, call by call."""
    recorder = make_recorder(folder / "rank-0", RankContext(), samples_every=0)
    began = time.process_time()
    for update in range(CALLS):
        recorder.progress(update, CALLS, 0, 32, 0.5)
    per_update = (time.process_time() - began) / CALLS
    recorder.close()
    run = RunDirectory(folder / "run")
    began = time.process_time()
    for _ in range(1000):
        for name in (STOP, CHECKPOINT, SETTINGS):
            (run.path / "requests" / name).exists()
        taken_by(run)
    per_look = (time.process_time() - began) / 1000
    event = Progress(time=1.0, update=1, updates=2, epoch=0, samples=32, loss=0.5)
    began = time.process_time()
    for _ in range(1000):
        encode_line(event)
    per_line = (time.process_time() - began) / 1000
    print(
        f"the training itself: {1e6 * per_update:.2f} us an update, and a second"
        f" {1e6 * per_line:.0f} us for a line and 2 x {1e6 * per_look:.0f} us for looks"
    )


if __name__ == "__main__":
    main()
