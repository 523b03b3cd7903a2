"""Seconds from Enter to the end of a training, beside plain PyTorch.

    python -m benchmarks.from_enter [--rounds 3] [--only "mnist 1"] [--exact] [--output FILE]

Each row trains, in turns, with the plain script (benchmarks/peers/plain.py), with Paceline as it
is, and, but for --exact, with Paceline when bf16 is allowed; every time in new processes and with
an empty cache.
Bars: no row more than 10% and 2 s slower than plain; exact at least 1.15 times as fast where plain
takes over a minute; the first update after at most twice the plain script's time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.interleave import Measured

ROOT = Path(__file__).parents[1]
SLOWER, SECONDS, FASTER, LONG, FIRST = 1.10, 2.0, 1.15, 60.0, 2.0
"""The bars: ratio and seconds that any row may be slower by, what a long one gains, its length in
seconds, and the first update's ratio."""


@dataclass(frozen=True)
class Row:
    """One training."""

    plain: str
    epochs: int
    config: str | None = None
    settings: tuple[str, ...] = ()


ROWS = {
    "digits": Row("digits", 15),
    "mnist 1": Row("mnist", 1, "mnist"),
    "mnist 5": Row("mnist", 5, "mnist"),
    "fire 1": Row("fire", 1, "fire"),
    "fire 3": Row("fire", 3, "fire"),
    "resnet18": Row("resnet18", 1, "resnet18", ("data.limit=8192",)),
}
WAYS = ("plain", "exact", "bf16")


@dataclass(frozen=True)
class Seen:
    """One training, from outside."""

    total: float
    first: float
    accuracy: float
    finding: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=ROWS, help="may be repeated")
    parser.add_argument("--exact", action="store_true", help="leave out what bf16 would change")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    ways = WAYS[:2] if options.exact else WAYS
    found: dict[str, dict[str, list[Seen]]] = {}
    for name in options.only or ROWS:
        seen: dict[str, list[Seen]] = {way: [] for way in ways}
        for number in range(options.rounds):
            for way in ways:
                one = train(ROWS[name], way)
                seen[way].append(one)
                print(
                    f"  {name}, round {number + 1}/{options.rounds}, {way}: {one.total:.1f} s,"
                    f" first update after {one.first:.1f} s, {one.accuracy:.2%}",
                    flush=True,
                )
        found[name] = seen
        print(sentence(name, seen), flush=True)
        if options.output:
            options.output.write_text(json.dumps(figures(found), indent=2) + "\n")


def train(row: Row, way: str) -> Seen:
    """One training in new processes, with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if way == "plain":
            result = place / "result.json"
            line = ["-m", "benchmarks.peers.plain", row.plain, "--epochs", str(row.epochs)]
            line += ["--result", str(result)]
        else:
            result = place / "run" / "run.json"
            line = ["-m", "paceline", "train", "--run", str(place / "run")]
            if row.config:
                line.append(str(ROOT / "examples" / f"{row.config}.toml"))
            settings = [*row.settings, f"train.epochs={row.epochs}"]
            if way == "bf16":
                settings.append("numerics.allow=['bf16']")
            line += [word for setting in settings for word in ("--set", setting)]
        start = time.time()
        done = subprocess.run(
            [sys.executable, *line],
            cwd=ROOT,
            env=os.environ | {"PACELINE_CACHE": str(place / "cache")},
            capture_output=True,
            text=True,
        )
        total = time.time() - start
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(line)} failed:\n{done.stdout}{done.stderr}")
        told: Mapping[str, Any] = json.loads(result.read_text())
        first = told.get("first_update") or first_update(place / "run")
        return Seen(
            total=total,
            first=first - start,
            accuracy=float(told["test_accuracy"]),
            finding=float(told.get("finding_seconds", 0.0)),
        )


def first_update(run: Path) -> float:
    """When the first update of a run was done, as its ranks recorded it."""
    ends: list[float] = []
    for path in run.glob("rank-*/events.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event.get("event") == "span" and event["name"] == "compute":
                ends.append(event["start"] + event["seconds"])
                break
    return min(ends)


def sentence(name: str, seen: Mapping[str, list[Seen]]) -> str:
    """What a row says, and whether it holds the bars."""
    totals = {way: Measured(tuple(one.total for one in values)) for way, values in seen.items()}
    plain = totals["plain"].median
    parts, missed = [f"{name}: plain {plain:.1f} s"], []
    for way in list(seen)[1:]:
        # Rounds are minutes apart, the trainings of one round are beside each other.
        pairs = list(zip(totals["plain"].rounds, totals[way].rounds, strict=True))
        ratios = sorted(theirs / ours for theirs, ours in pairs)
        ratio = statistics.median(ratios)
        parts.append(
            f"{way} {totals[way].median:.1f} s, {ratio:.2f} times as fast"
            f" ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
        late = statistics.median(ours - theirs for theirs, ours in pairs)
        if ratio < 1 / SLOWER and late > SECONDS:
            missed.append(f"{way} is slower than plain")
        if way == "exact" and plain > LONG and ratio < FASTER:
            missed.append(f"{way} is not {FASTER} times as fast")
        first = statistics.median(
            ours.first / theirs.first for theirs, ours in zip(seen["plain"], seen[way], strict=True)
        )
        parts.append(f"first update after {first:.2f} times plain's")
        if first > FIRST:
            missed.append(f"{way}'s first update is late")
    return "; ".join(parts) + (f"; MISSED: {', '.join(missed)}" if missed else "; bars held")


def figures(found: Mapping[str, Mapping[str, list[Seen]]]) -> dict[str, Any]:
    """All that was seen."""
    return {
        name: {way: [vars(one) for one in values] for way, values in seen.items()}
        for name, seen in found.items()
    }


if __name__ == "__main__":
    main()
