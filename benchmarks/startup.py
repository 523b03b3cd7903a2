"""Seconds, and processor seconds, from Enter to the end of the first update, by number of nodes.

    python -m benchmarks.startup                      # 1, 2, 4, 8, 16, 32 nodes of this machine
    python -m benchmarks.startup --lab --nodes 1,2,4  # hosts of a lab (needs root)

The model is small, so that what is timed is starting: checks, agents, imports, rendezvous. Rounds
are interleaved. Where nodes share cores, processor seconds say more than seconds: what grows with
each node is their difference, divided by the nodes that were added.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.schema.events import Span, decode_line

NODES = (1, 2, 4, 8, 16, 32)
SETTINGS = (
    "workload.model=shallow_cnn",
    "workload.data=synthetic",
    "workload.batch_size=64",
    "data.options={ shape = [1, 28, 28], samples = 640, test_samples = 64 }",
    "train.steps=2",
)


def main() -> None:
    """Print one line for each number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default=",".join(map(str, NODES)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lab", action="store_true", help="hosts of a lab instead of local nodes")
    options = parser.parse_args()
    counts = [int(word) for word in options.nodes.split(",")]
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    for _ in range(options.rounds):
        for count in counts:
            found[count].append(started(count, lab=options.lab))
    print("nodes   s to the first update   spread   CPU s")
    for count, pairs in found.items():
        seconds = [pair[0] for pair in pairs]
        used = statistics.median(pair[1] for pair in pairs)
        spread = max(seconds) - min(seconds)
        print(f"{count:5d}   {statistics.median(seconds):21.2f}   {spread:6.2f}   {used:5.1f}")


def started(count: int, *, lab: bool) -> tuple[float, float]:
    """Seconds to the end of the first update, and processor seconds of the whole run."""
    with tempfile.TemporaryDirectory(prefix="paceline-startup-") as folder:
        run = Path(folder) / "run"
        words = [word for pair in SETTINGS for word in ("--set", pair)]
        hosts = "lab" if lab else f"localhost:{count}"
        command = [sys.executable, "-m", "paceline.cli", "train", "--run", str(run), *words]
        command += ["--hosts", hosts, "--engine", "ssh", "--again"]
        with command_for(command, count, lab=lab, folder=Path(folder)) as line:
            entered = time.time()
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            environment = os.environ | {"PACELINE_CACHE": str(Path(folder) / "cache")}
            subprocess.run(line, check=True, env=environment, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return first_update(run) - entered, used


def first_update(run: Path) -> float:
    """When the first update ended, by the clock of the first rank (all are on this machine)."""
    lines = (run / "rank-0" / "events.jsonl").read_text().splitlines()
    events = (decode_line(line) for line in lines)
    spans = [e for e in events if isinstance(e, Span) and e.update is not None]
    first = min(span.update or 0 for span in spans)
    return max(span.end for span in spans if span.update == first)


@contextlib.contextmanager
def command_for(command: list[str], count: int, *, lab: bool, folder: Path) -> Iterator[list[str]]:
    """The command itself, or in a lab of so many hosts."""
    if not lab:
        yield command
        return
    file = folder / "lab.toml"
    tables = [f'[[host]]\nname = "h{number}"\ncores = 0.5\n' for number in range(count)]
    file.write_text("\n".join([*tables, '[link]\nrate = "1gbit"\n']))
    yield [sys.executable, "-m", "paceline.cli", "lab", "run", str(file), "--", *command]


if __name__ == "__main__":
    main()
