"""Paceline beside every peer that is installed, on the same batches, interleaved.

    python -m benchmarks.beside [--size small|alexnet|vgg16] [--place one|hosts] [--rounds 3]
                                [--only NAME] [--setting 1x2] [--limit SECONDS]
                                [--out FOLDER]

Places: `one` is this machine as it is, `hosts` two emulated hosts joined by 1 Gbit/s that see two
cores each and may use the time of one (needs root). In the first round every peer runs with each of
its settings (processes x threads per host, and what its launcher does by itself); the best goes on
to the other rounds; all are in the table. Every training starts from the same weights and takes the
same batches with the same optimizer; dropout, whose draws depend on the ranks, is off. The first
epoch warms up and is left out. `losses` says how far the losses of the last epoch are from those of
plain PyTorch in one process. Install peers with `paceline peers install NAME`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from studies.lerat.speeds import images_per_second
from studies.outcome import StepOutcome
from studies.peers.environments import find_peer
from studies.peers.recipes import names
from studies.running import Work, machine_words, run_step
from studies.spec import StudyStep

EXACT = 1e-4
"""Largest relative difference of losses that the order of sums explains."""
LAUNCHER = 0
"""Threads as the launcher leaves them."""
VARIANTS: Mapping[str, Sequence[str]] = {"tensorflow": ("mirrored", "server")}
ASYNCHRONOUS = ("tensorflow server",)
"""Whose updates are of older weights: their losses are others by design."""
UNSET = ("horovod", "spark")
"""Whose launcher sets no number of threads: run as it comes, too."""

COMMON = {
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 0.01,
    "optimizer.momentum": 0.9,
    "train.epochs": 3,
    "train.evaluate_every": 3,
    "train.keep": 1,
    "train.deadline": 300.0,
    "numerics.precision": "fp32",
    "workload.data": "synthetic",
    "workload.classes": 10,
}


def _made(shape: Sequence[int], samples: int) -> dict[str, Any]:
    return {"shape": list(shape), "classes": 10, "samples": samples, "test_samples": 32}


SIZES: Mapping[str, Mapping[str, Any]] = {
    "small": {
        "workload.model": "shallow_cnn",
        "workload.batch_size": 32,
        "data.options": _made((1, 28, 28), 512),
    },
    "alexnet": {
        "workload.model": "alexnet",
        "workload.model_options": {"dropout": 0.0},
        "workload.batch_size": 32,
        "data.options": _made((3, 224, 224), 256),
    },
    "vgg16": {
        "workload.model": "vgg16",
        "workload.model_options": {"dropout": 0.0},
        "workload.batch_size": 8,
        "data.options": _made((3, 224, 224), 24),
    },
}
PLACES: Mapping[str, Mapping[str, Any]] = {
    "one": {},
    "hosts": {"hosts": (1.0, 1.0), "visible": 2, "rate": "1gbit"},
}


@dataclass
class Contender:
    """One way of training, and what it did in each round."""

    name: str
    """Of the system."""
    setting: str
    step: StudyStep
    outcomes: list[StepOutcome] = field(default_factory=list)

    def has(self, settings: Sequence[str] | None) -> bool:
        """Whether its setting is asked for; plain PyTorch and Paceline have one alone."""
        return not settings or not self.step.processes or self.setting.replace(" ", "") in settings

    @property
    def speeds(self) -> list[float]:
        return [speed for each in self.outcomes if (speed := images_per_second(each))]

    @property
    def failed(self) -> str:
        """Why the last try gave nothing; nothing where it did."""
        return self.outcomes[-1].failed if self.outcomes else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", action="append", choices=SIZES, help="may be repeated; all")
    parser.add_argument("--place", action="append", choices=PLACES, help="may be repeated; all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", action="append", help="paceline, plain, ddp or a peer; repeatable"
    )
    parser.add_argument(
        "--setting", action="append", help="1x2, 2x1 or 2xlauncher, of the peers; repeatable; all"
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of one training")
    parser.add_argument("--out", type=Path, default=Path("beside"))
    options = parser.parse_args()
    told = []
    for name in names():
        peer = find_peer(name)
        if not peer.ready and (not options.only or name in options.only):
            told.append(f"{name} is not ready: {peer.remedy}")
    print("\n".join(told), flush=True)
    found: dict[str, Any] = {"when": f"{datetime.now():%Y-%m-%d %H:%M}", "machine": machine_words()}
    found |= {"missing": told, "tables": []}
    for place in options.place or PLACES:
        for size in options.size or SIZES:
            contenders = contenders_of(size, place, options.only, options.limit)
            contenders = [each for each in contenders if each.has(options.setting)]
            compare(contenders, options.out / f"{place}-{size}", options.rounds)
            rows = rows_of(contenders)
            found["tables"].append({"place": place, "size": size, "rows": rows})
            print(table(f"{size}, {place}", rows), flush=True)
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "beside.json").write_text(json.dumps(found, indent=2) + "\n")
    failed = [row for each in found["tables"] for row in each["rows"] if row["failed"]]
    raise SystemExit(1 if failed else 0)


def contenders_of(
    size: str, place: str, only: Sequence[str] | None, limit: float
) -> list[Contender]:
    """Plain PyTorch, Paceline, stock DDP and all peers that can train here, each setting."""
    settings = {**COMMON, **SIZES[size]}
    where: dict[str, Any] = {**PLACES[place], "limit": limit}
    visible = int(where.get("visible", len(os.sched_getaffinity(0))))

    def peer(name: str, **how: Any) -> StudyStep:
        label = "-".join(str(value) for value in how.values()) or "own"
        return StudyStep(
            name=f"{name}-{label}", kind="peer", peer=name, settings=settings, **where, **how
        )

    train = StudyStep(name="paceline", settings=settings, **where)
    found = [
        # The reference is one process on this machine, wherever the others are.
        Contender("plain", "1 process", dataclasses.replace(peer("alone"), hosts=())),
        Contender("paceline", "its own choice", train),
    ]
    ready = [name for name in names() if find_peer(name).ready]
    for name in ["ddp", *ready]:
        for variant in VARIANTS.get(name, ("",)):
            way = {"variant": variant} if variant else {}
            for processes, threads in ranks_of(name, visible):
                words = f"{processes} x {threads or 'launcher'}"
                step = peer(name, processes=processes, threads=threads, **way)
                found.append(Contender(f"{name} {variant}".strip(), words, step))
    kept = ("plain", *(only or ()))
    return [each for each in found if not only or each.name.split()[0] in kept]


def ranks_of(name: str, visible: int) -> list[tuple[int, int]]:
    """Processes and threads of each, per host: a process per core, and one with all cores."""
    found = [(visible, 1), (1, visible)] if visible > 1 else [(1, 1)]
    return [*found, (visible, LAUNCHER)] if name in UNSET and visible > 1 else found


def compare(contenders: Sequence[Contender], out: Path, rounds: int) -> None:
    """All settings once, then the best of each system in turn."""
    staying = list(contenders)
    for number in range(rounds):
        for each in staying:
            work = Work(step=each.step, out=out / f"round-{number + 1}")
            each.outcomes.append(run_step(work, again=True))
            speed = images_per_second(each.outcomes[-1])
            said = each.failed or (f"{speed:,.1f} images/s" if speed else "no speed in its result")
            print(f"  round {number + 1}/{rounds}  {each.name}, {each.setting}: {said}", flush=True)
        staying = best_of(contenders)


def best_of(contenders: Sequence[Contender]) -> list[Contender]:
    """The fastest setting of every system that trained."""
    best: dict[str, Contender] = {}
    for each in contenders:
        before = best.get(each.name)
        if each.speeds and (before is None or each.speeds[0] > before.speeds[0]):
            best[each.name] = each
    return list(best.values())


def rows_of(contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """What the table and the JSON say of each."""
    best = {id(each) for each in best_of(contenders)}
    plain = next(each for each in contenders if each.name == "plain")
    own = next((each for each in contenders if each.name == "paceline"), None)
    rows = []
    for each in contenders:
        result = each.outcomes[-1].result if each.outcomes else {}
        speeds = each.speeds
        rows.append(
            {
                "system": each.name,
                "version": result.get("version") or result.get("torch"),
                "setting": each.setting,
                "best": id(each) in best,
                "rounds": speeds,
                "images_per_second": statistics.median(speeds) if speeds else None,
                "paceline_is": ratio(own, each),
                "losses": difference(each, plain),
                "asynchronous": each.name in ASYNCHRONOUS,
                "bytes_per_update": sent_per_update(each),
                "seconds": each.outcomes[-1].seconds if each.outcomes else None,
                "failed": each.failed,
            }
        )
    return rows


def ratio(own: Contender | None, other: Contender) -> float | None:
    """How many times as fast Paceline is: median over rounds, which are pairs."""
    if own is None or not own.speeds or not other.speeds:
        return None
    return statistics.median(a / b for a, b in zip(own.speeds, other.speeds, strict=False))


def last_loss(contender: Contender) -> float | None:
    """Mean loss of the last epoch."""
    outcome = contender.outcomes[-1] if contender.outcomes else None
    if outcome is None or not outcome.done:
        return None
    if outcome.run is not None:
        return float(outcome.run.metrics[-1]["train_loss"])
    return float(outcome.result["train_loss"])


def difference(contender: Contender, plain: Contender) -> float | None:
    """Relative distance of the last epoch's loss from plain PyTorch's."""
    own, reference = last_loss(contender), last_loss(plain)
    if own is None or reference is None:
        return None
    return abs(own - reference) / abs(reference) if math.isfinite(own) else math.inf


def sent_per_update(contender: Contender) -> float | None:
    """Bytes that a host's kernel sent per update, mean over hosts; None on one machine."""
    outcome = contender.outcomes[-1] if contender.outcomes else None
    if outcome is None or not outcome.done or not outcome.step.hosts:
        return None
    sent = outcome.number("bytes_sent")
    if outcome.run is not None or not sent:
        return None
    updates = sum(int(epoch["updates"]) for epoch in outcome.result["epochs"])
    return sent / updates / len(outcome.step.hosts)


def judged(row: Mapping[str, Any]) -> str:
    """In words, whether the losses are those of plain PyTorch."""
    if row["asynchronous"]:
        return "asynchronous"
    if row["losses"] is None:
        return ""
    return f"{'same' if row['losses'] <= EXACT else 'DIFFER'} ({row['losses']:.0e})"


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """For the terminal; * marks the best setting of a system."""
    head = (
        "system",
        "version",
        "setting",
        "images/s",
        "spread",
        "Paceline is",
        "losses",
        "MB/host",
    )
    lines = [head]
    for row in rows:
        speeds, mean = row["rounds"], row["images_per_second"]
        sent = row["bytes_per_update"]
        lines.append(
            (
                row["system"],
                str(row["version"] or ""),
                row["setting"] + (" *" if row["best"] else ""),
                f"{mean:,.1f}" if mean else "failed",
                f"{(max(speeds) - min(speeds)) / mean:.0%}" if len(speeds) > 1 else "",
                f"{row['paceline_is']:.2f} x" if row["paceline_is"] else "",
                judged(row) if mean else row["failed"][:60],
                f"{sent / 1e6:,.1f}" if sent else "",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    texts = ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
             for line in lines]  # fmt: skip
    return "\n".join([f"\n{title}", *texts])


if __name__ == "__main__":
    main()
