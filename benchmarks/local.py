"""Paceline's choice against stock PyTorch on one machine: `make bench-local`.

    python -m benchmarks.local [--rounds 3] [--only mnist_cnn --only vgg16] [--output FILE]

For each workload, in one run and interleaved: one core, in fp32 and bf16, stock PyTorch with all
threads, stock DDP over Gloo under torchrun with 2 processes, and what Paceline's
race chose, exact and with bf16 allowed. Then every candidate measured to the end,
to see how far the choice is from the best. Real data where PACELINE_DATA has it.
ResNet-18 has torchvision's stem (7x7, stride 2).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.interleave import interleave
from paceline.plan.choose import pick
from paceline.schema import Candidate, decode, encode
from paceline.schema.events import FILE_NAME
from paceline.text import rate

CLOSE, RIVALS = 0.97, 2
"""So many candidates, of those that look better than the choice or come close, train with it."""
FEWEST, SETTLED = 5, 0.012
"""So many times at least, and on until the standard error of what they differ by is so small."""
BARS = {  # exact and bf16, against stock DDP
    "mnist_cnn": (1.05, 1.5),
    "resnet18": (1.3, 1.7),
    "alexnet": (1.3, 1.9),
    "vgg16": (1.15, 1.9),
}


@dataclass(frozen=True)
class Case:
    """One workload."""

    model: str
    batch: int
    size: int
    channels: int
    classes: int
    updates: int
    """Timed in each round."""
    data: str
    warmup: int = 5
    """Before those: the first updates of a training take memory from the system."""
    duels: int = 12
    """How often a choice and the candidates that looked best train in turns, at most."""


CASES = (
    Case("mnist_cnn", 128, 28, 1, 10, 80, "mnist"),
    Case("resnet18", 128, 28, 1, 10, 30, "mnist"),
    Case("alexnet", 32, 224, 3, 3, 12, "fire"),
    Case("vgg16", 8, 224, 3, 3, 6, "fire", warmup=3, duels=5),
)


def main() -> None:
    cases = {case.model: case for case in CASES}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", action="append", choices=cases, help="may be repeated; in the order given"
    )
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--no-thorough", action="store_true", help="skip the candidates to the end")
    options = parser.parse_args()
    results = {}
    for case in [cases[name] for name in options.only or cases]:
        print(f"== {case.model}, batch {case.batch}", flush=True)
        results[case.model] = run_case(case, options.rounds, thorough=not options.no_thorough)
        print(table(case, results[case.model]), flush=True)
        if options.output:
            options.output.write_text(json.dumps(results, indent=2) + "\n")


def run_case(case: Case, rounds: int, *, thorough: bool) -> dict[str, Any]:
    """Race, then measure the choice and stock PyTorch side by side."""
    race = paceline_json("race", *settings(case), "--again")
    entries = [decode(Candidate, entry) for entry in race["candidates"]]
    choices = {"exact": pick(entries, ()), "bf16": pick(entries, ("bf16",))}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for label, choice in choices.items():
            write_plan(place / f"{label}.json", case, choice)
        contenders: dict[str, Callable[[], float]] = {
            "one core": lambda: stock(case, threads=1),
            "one core, bf16": lambda: stock(case, threads=1, precision="bf16"),
            "stock, all threads": lambda: stock(case, threads=os.cpu_count() or 1),
            "stock DDP 2x1": lambda: stock(case, ranks=2),
            "paceline exact": lambda: trained(case, place / "exact.json"),
            "paceline, bf16 allowed": lambda: trained(case, place / "bf16.json"),
        }
        found = interleave(contenders, rounds)
        result: dict[str, Any] = {
            name: {
                "seconds": measured.rounds,
                "images_per_second": case.batch / measured.median,
                "spread": measured.spread,
            }
            for name, measured in found.items()
        }
        result["choices"] = {label: choice.name for label, choice in choices.items()}
        result["precisions"] = {label: choice.precision for label, choice in choices.items()}
        result["race_seconds"] = race["seconds"]
        if thorough:
            result["behind_best"] = behind_best(case, choices, place)
    return result


def behind_best(case: Case, choices: dict[str, Candidate], place: Path) -> dict[str, Any]:
    """How far each choice is behind the best candidate, all measured to the end.

    Of thirty candidates some look better by luck: those that look best or come close, and the
    choice, then train in turns, and that decides.
    """
    race = paceline_json("race", *settings(case), "--thorough", "--seconds=120")
    entries = [decode(Candidate, entry) for entry in race["candidates"]]
    seen = {c.name: c.images_per_second for c in entries if c.images_per_second}
    result: dict[str, Any] = {}
    for label, choice in choices.items():
        rivals = [
            c
            for c in sorted(entries, key=lambda c: seen.get(c.name, 0.0), reverse=True)
            if (c.exact or label == "bf16")
            and c.name != choice.name
            and seen.get(c.name, 0.0) > CLOSE * seen[choice.name]
        ]
        plans = {choice.name: place / f"{label}.json"}
        for number, rival in enumerate(rivals[:RIVALS]):
            plans[rival.name] = place / f"{label}-{number}.json"
            write_plan(plans[rival.name], case, rival)
        found = {}
        if rivals:
            found = interleave(
                {name: partial(trained, case, plan) for name, plan in plans.items()},
                case.duels,
                settled=partial(is_settled, choice.name),
            )
        rounds = {name: measured.rounds for name, measured in found.items()}
        result[label] = {
            "seen": {name: seen[name] for name in plans},
            "seconds": rounds,
            "behind": {
                name: behind(rounds[choice.name], rounds[name])
                for name in rounds
                if name != choice.name
            },
        }
    return result


def behind(choice: Sequence[float], rival: Sequence[float]) -> tuple[float, float]:
    """By which part of its time a choice is behind a rival, round by round; its standard error.

    The mean, not the median: where a machine has several speeds, training meets all of them.

    >>> behind([1.0, 2.0], [1.0, 1.0])
    (0.25, 0.25)
    """
    parts = [1 - other / own for own, other in zip(choice, rival, strict=True)]
    return statistics.fmean(parts), statistics.stdev(parts) / len(parts) ** 0.5


def is_settled(choice: str, seconds: Mapping[str, Sequence[float]]) -> bool:
    """Whether it is known how far a choice is from each rival.

    >>> is_settled("a", {"a": [1.0] * 5, "b": [1.1] * 5})
    True
    >>> is_settled("a", {"a": [1.0] * 5, "b": [1.1, 0.9, 1.0, 1.1, 0.9]})
    False
    """
    rivals = [rival for name, rival in seconds.items() if name != choice]
    return len(seconds[choice]) >= FEWEST and all(
        behind(seconds[choice], rival)[1] <= SETTLED for rival in rivals
    )


def settings(case: Case) -> list[str]:
    """The workload as settings on the command line."""
    root = os.environ.get("PACELINE_DATA")
    real = root is not None and (Path(root) / case.data).exists()
    values = {
        "workload.model": case.model,
        "workload.batch_size": case.batch,
        "data.image_size": case.size,
        "workload.data": case.data if real else "synthetic",
        "optimizer.name": "adam" if case.model == "mnist_cnn" else "sgd",
        "optimizer.learning_rate": 1e-6,
        "data.limit": case.batch * (case.warmup + case.updates + 1),
    }
    if case.model != "mnist_cnn":
        values["optimizer.momentum"] = 0.9
    if not real:
        values["data.options"] = (
            f"{{ shape = [{case.channels}, {case.size}, {case.size}], classes = {case.classes} }}"
        )
    return [f"--set={key}={value}" for key, value in values.items()]


def trained(case: Case, plan: Path) -> float:
    """Seconds per update of a real training with this plan, from one update to the next."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        paceline_json(
            "train",
            *settings(case),
            f"--plan={plan}",
            f"--run={run}",
            f"--set=train.steps={case.warmup + case.updates + 1}",
        )
        events = [
            json.loads(line) for line in (run / "rank-0" / FILE_NAME).read_text().splitlines()
        ]
    starts = [event["start"] for event in events if event.get("name") == "compute"][case.warmup :]
    return statistics.median(after - before for before, after in itertools.pairwise(starts))


def stock(case: Case, *, threads: int = 0, ranks: int = 1, precision: str = "fp32") -> float:
    """Seconds per update of stock PyTorch."""
    numbers = (case.batch, case.size, case.channels, case.classes)
    lengths = (case.warmup, case.updates, threads)
    arguments = ["-m", "benchmarks.stock", case.model, precision, *map(str, numbers + lengths)]
    if ranks > 1:
        launcher = shutil.which("torchrun", path=str(Path(sys.executable).parent)) or "torchrun"
        command = [launcher, "--standalone", "--nproc-per-node", str(ranks), *arguments]
    else:
        command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("seconds "):
            return float(line.split()[1])
    raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")


def paceline_json(command: str, *arguments: str) -> dict[str, Any]:
    """What a paceline command prints with --json."""
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", command, *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"paceline {command} failed: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def write_plan(path: Path, case: Case, choice: Candidate) -> None:
    plan = {
        "nodes": [encode(choice.node)],
        "precision": choice.precision,
        "memory_format": choice.memory_format,
        "batch_size": case.batch,
    }
    path.write_text(json.dumps(plan))


def table(case: Case, result: dict[str, Any]) -> str:
    """The figures of one workload as Markdown, and what became of the bars."""
    base = result["stock DDP 2x1"]["images_per_second"]
    names = {"paceline exact": "exact", "paceline, bf16 allowed": "bf16"}
    lines = [
        "| | images/s | spread | against stock DDP | of cores x one core |",
        "|---|---|---|---|---|",
    ]
    for name, entry in result.items():
        if not isinstance(entry, dict) or "images_per_second" not in entry:
            continue
        speed = entry["images_per_second"]
        label = names.get(name)
        # The limit is of the same precision.
        bf16 = name == "one core, bf16" or (label and result["precisions"][label] == "bf16")
        one = result["one core, bf16" if bf16 else "one core"]["images_per_second"]
        shown = f"{name}: {result['choices'][label]}" if label else name
        lines.append(
            f"| {shown} | {rate(speed)} | {entry['spread']:.0%} | {speed / base:.2f} |"
            f" {speed / ((os.cpu_count() or 1) * one):.0%} |"
        )
    lines.append(f"\nrace {result['race_seconds']:.0f} s")
    for (name, label), bar in zip(names.items(), BARS[case.model], strict=True):
        ratio = result[name]["images_per_second"] / base
        against = result.get("behind_best", {}).get(label)
        lines.append(
            f"{name}: {ratio:.2f} times stock DDP, bar {bar}: {'met' if ratio >= bar else 'missed'}"
        )
        if against:
            lines.append("    " + standing(against))
    return "\n".join(lines)


def standing(against: dict[str, Any]) -> str:
    """Where a choice stands among all candidates, in words."""
    (choice, speed), *rivals = against["seen"].items()
    if not rivals:
        return f"best of all candidates measured to the end: {choice}"
    shown = []
    for name, other in rivals:
        part, error = against["behind"][name]
        place = f"{part:.1%} behind" if part > 0 else f"{-part:.1%} ahead of"
        shown.append(
            f"in training {place} {name} (standard error {error:.1%}),"
            f" which looked {other / speed:.3f} times as fast"
        )
    return "; ".join(shown) + " (bar: 3% behind)"


if __name__ == "__main__":
    main()
