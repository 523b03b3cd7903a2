"""Two emulated hosts beside one of them alone: what `train --hosts` decides, and what it gives.

    PACELINE_DATA=DIR python -m benchmarks.over_hosts [--rounds 3] [--only resnet18] [--output FILE]

Each row trains the same updates, in turns, on one host of the lab, on both (`train --hosts lab`),
and on both started by hand (`mpiexec`), with an empty cache every time. Rates count from the first
leg's beginning to the last one's end, trials and handovers included. Bars: a network that does not
pay leaves at least 0.93 of one host's rate; one that does pays 1.5 times; by hand within 5%.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAB = ROOT / "examples" / "lab" / "two-hosts.toml"
NEAR = 0.05
"""How far apart two starts of the same training may be."""
LONGEST = 1800.0
"""Seconds after which a training is given up."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training, and what two hosts must reach of one host's rate."""

    bar: float
    settings: Mapping[str, object]
    rate: str = "100mbit"


ROWS = {
    "resnet18": Row(
        bar=0.93,
        settings={
            "workload.model": "resnet18",
            "workload.data": "mnist",
            "data.image_size": 28,
            "optimizer.name": "sgd",
            "train.steps": 420,
        },
    ),
    "mnist_cnn": Row(
        bar=1.5,
        settings={
            "workload.model": "mnist_cnn",
            "workload.data": "mnist",
            "workload.batch_size": 2048,
            "train.steps": 160,  # a minute and a half on both
        },
    ),
}


@dataclass(frozen=True)
class Seen:
    """One training: its rate, what it ended with, and what it said of hosts left out."""

    rate: float
    ended_with: str
    said: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=ROWS, help="may be repeated")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    found: dict[str, dict[str, list[Seen]]] = {}
    for name in options.only or ROWS:
        row, seen = ROWS[name], {way: [] for way in ("alone", "hosts", "by hand")}
        for number in range(options.rounds):
            for way, results in seen.items():
                one = train(row, way)
                results.append(one)
                print(
                    f"  {name}, round {number + 1}/{options.rounds}, {way}: {one.rate:.1f}"
                    f" images/s, ended with {one.ended_with} {one.said}",
                    flush=True,
                )
        found[name] = seen
        print(sentence(name, row, seen), flush=True)
        if options.output:
            options.output.write_text(json.dumps(figures(found), indent=2) + "\n")


def train(row: Row, way: str) -> Seen:
    """One training in a lab of its own, with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        line = [sys.executable, "-m", "paceline", "train", "--run", str(run)]
        for key, value in row.settings.items():
            line += ["--set", f"{key}={value}"]
        if way == "hosts":
            line += ["--hosts", "lab"]
        elif way == "by hand":
            mpiexec = Path(sys.executable).with_name("mpiexec")
            line = [str(mpiexec), "-n", "2", "-H", "a,b", "--bind-to", "none", *line]
        lab = [sys.executable, "-m", "paceline", "lab", "run", "--set", f"link.rate={row.rate}"]
        done = subprocess.run(
            [*lab, str(LAB), "--", *line],
            cwd=ROOT,
            env=os.environ
            | {
                "PACELINE_CACHE": f"{folder}/cache",
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            },
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(line)} failed:\n{done.stdout}{done.stderr}")
        legs = [json.loads(each) for each in (run / "legs.jsonl").read_text().splitlines()]
        last = legs[-1]
        seconds = last["began_at"] + last["setup_seconds"] + last["seconds"] - legs[0]["began_at"]
        images = sum(leg["updates"] * leg["plan"]["batch_size"] for leg in legs)
        said = [text for text in done.stdout.splitlines() if "left out" in text]
        return Seen(images / seconds, last["name"], "; ".join(said))


def sentence(name: str, row: Row, seen: Mapping[str, list[Seen]]) -> str:
    """What a row says, and whether it holds its bars."""
    alone = [one.rate for one in seen["alone"]]
    parts, missed = [f"{name}, {row.rate}: alone {statistics.median(alone):.1f} images/s"], []
    for way in ("hosts", "by hand"):
        ratios = sorted(one.rate / beside for one, beside in zip(seen[way], alone, strict=True))
        middle = statistics.median(ratios)
        parts.append(f"{way} {middle:.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        if middle < row.bar:
            missed.append(f"{way} is below {row.bar}")
    pairs = zip(seen["hosts"], seen["by hand"], strict=True)
    apart = statistics.median(hand.rate / hosts.rate for hosts, hand in pairs)
    parts.append(f"by hand {apart:.2f} of hosts")
    if abs(apart - 1) > NEAR:
        missed.append("by hand and hosts are apart")
    return "; ".join(parts) + (f"; MISSED: {', '.join(missed)}" if missed else "; bars held")


def figures(found: Mapping[str, Mapping[str, list[Seen]]]) -> dict[str, object]:
    """All that was seen."""
    return {
        name: {way: [asdict(one) for one in results] for way, results in seen.items()}
        for name, seen in found.items()
    }


if __name__ == "__main__":
    main()
