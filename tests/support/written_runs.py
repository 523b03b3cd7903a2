"""Run directories written through the schemas, for what reads them: no training is needed.

The times are made up, with one slow rank, so that what a report must say of them is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from paceline.schema import Candidate, NodePlan, Plan, Race, Rejected, encode, write_json
from paceline.schema.events import (
    End,
    Event,
    Exchanged,
    InterfaceTraffic,
    Sample,
    Span,
    Start,
    encode_line,
)
from paceline.schema.legs import Leg

BEGAN = 1_700_000_000.0
UPDATE = 0.4
SLOW = 2
"""The rank that the others wait for, where there are so many."""


def write_run(
    path: Path,
    *,
    hosts: Sequence[str] = ("a",),
    batch: int = 128,
    speed: float = 1000.0,
    exchange: str = "allreduce",
    model: str = "mnist_cnn",
    epochs: int = 4,
    observed: bool = True,
) -> Path:
    """A finished run; `observed` adds race, predictions and the events of one rank per host."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(
        f'name = "{path.name}"\nseed = 0\n[workload]\nmodel = "{model}"\ndata = "mnist"\n'
        f"batch_size = {batch}\n[train]\nepochs = {epochs}\n"
        '[optimizer]\nname = "adam"\n[versions]\npaceline = "0.1.0"\n'
    )
    write_json(
        path / "plan.json",
        Plan(
            nodes=tuple(NodePlan(host=host, share=1 / len(hosts)) for host in hosts),
            exchange=exchange,
            batch_size=batch,
            reason="the fastest of what was tried",
            predicted={"images_per_second": speed * 1.1, "update_seconds": batch / speed / 1.1},
            rejected=(Rejected(option="threads 2", images_per_second=speed / 2, reason="slower"),),
        ),
    )
    lines = [metrics_line(epoch + 1, epochs, speed, batch) for epoch in range(epochs)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    last = lines[-1]
    write_json(
        path / "run.json",
        {
            "name": path.name,
            "finished": True,
            "epochs": epochs,
            "updates": epochs * 40,
            "images_per_second": speed,
            "update_seconds_median": batch / speed,
            "epoch_seconds_median": 4000 / speed,
            "total_seconds": epochs * 5000 / speed,
            "test_accuracy": last["test_accuracy"],
            "test_loss": last["test_loss"],
        },
    )
    if observed:
        write_json(path / "race.json", written_race())
        for rank, host in enumerate(hosts):
            write_events(path, rank, host, len(hosts))
    return path


def write_legs(path: Path) -> None:
    """A training that tried a layout, left it, and went on with processes."""
    legs = [
        Leg(name="threads 2", role="first", updates=4, began_at=1.0, seconds=0.4),
        Leg(name="threads 2, channels_last", role="trial", first=4, updates=9, began_at=1.5,
            setup_seconds=0.2, seconds=1.0, update_seconds=0.11, began="may take 10% less time"),
        Leg(name="processes 2x1", role="trial", first=13, updates=100, began_at=3.0,
            setup_seconds=0.5, seconds=7.0, update_seconds=0.07),
    ]  # fmt: skip
    (path / "legs.jsonl").write_text("".join(json.dumps(encode(leg)) + "\n" for leg in legs))
    summary = json.loads((path / "run.json").read_text())
    write_json(path / "run.json", summary | {"finding_seconds": 0.9, "saved_seconds": 3.0})


def metrics_line(epoch: int, epochs: int, speed: float, batch: int) -> dict[str, float]:
    """Loss falls and accuracy rises; larger batches learn less per epoch."""
    rate = epoch * 64 / (32 + batch)
    return {
        "epoch": epoch,
        "train_loss": 2.3 * math.exp(-rate),
        "train_accuracy": 1 - 0.9 * math.exp(-rate),
        "test_loss": 2.2 * math.exp(-rate),
        "test_accuracy": 1 - 0.85 * math.exp(-rate),
        "images_per_second": speed * (1 + 0.02 * (epoch % 3 - 1)),
        "seconds": 4000 / speed,
        "read_seconds": 0.02,
        "update_seconds_median": batch / speed,
        "bytes_sent": 2_770_000 * 40,
    }


def written_race() -> Race:
    """Three candidates, the first chosen, one that changes results."""
    return Race(
        workload="mnist_cnn",
        batch_size=128,
        cores=2,
        seconds=20.0,
        decision="threads 2: 2,000 images/s, 1.90x sequential",
        candidates=(
            Candidate(name="threads 2", images_per_second=2000, low=1950, high=2040, speedup=1.9,
                      chosen=True, reason="the fastest", memory_mb=400),
            Candidate(name="threads 2, bf16", images_per_second=3000, speedup=2.8, exact=False,
                      reason="changes results"),
            Candidate(name="sequential", images_per_second=1050, low=1040, high=1060, speedup=1.0,
                      reason="48% slower"),
        ),
    )  # fmt: skip


def write_events(path: Path, rank: int, host: str, ranks: int) -> None:
    """Spans of forty updates and a sample a second; the slow rank computes half as fast."""
    folder = path / f"rank-{rank}"
    folder.mkdir()
    events: list[Event] = [
        Start(rank=rank, node=rank, host=host, pid=100 + rank, time=BEGAN, began=BEGAN - 1.0,
              world_size=ranks, uncertainty=0.0002 if rank else 0.0)
    ]  # fmt: skip
    for update in range(40):
        events += update_spans(update, rank, ranks)
        if ranks > 1:
            events.append(_exchanged(update, rank, ranks))
    for second in range(17):
        events.append(_sample(second, rank))
    events.append(End(time=BEGAN + 40 * UPDATE))
    (folder / "events.jsonl").write_text("".join(encode_line(event) for event in events))


def update_spans(update: int, rank: int, ranks: int) -> list[Span]:
    """One update: read, forward, backward, wait for the slow one, exchange, optimizer."""
    pace = 1.0 if ranks > SLOW and rank == SLOW else 0.5
    lengths: list[tuple[str, float]] = [
        ("read", 0.01),
        ("forward", 0.10 * pace),
        ("backward", 0.20 * pace),
        ("wait", 0.30 * (1 - pace) if ranks > 1 else 0.0),
        ("exchange", 0.05 if ranks > 1 else 0.0),
        ("optimizer", 0.02),
    ]
    spans, at = [], BEGAN + update * UPDATE
    for name, seconds in lengths:
        if seconds:
            spans.append(
                Span(
                    name=name,  # type: ignore[arg-type]
                    start=at,
                    seconds=seconds,
                    update=update,
                    waited_for=(SLOW,) if name == "wait" and ranks > SLOW else (),
                    bytes_sent=2_770_000 if name == "exchange" else 0,
                )
            )
        at += seconds
    return spans


def _exchanged(update: int, rank: int, ranks: int) -> Exchanged:
    waiting = 0.2 if ranks <= SLOW or rank != SLOW else 0.05
    return Exchanged(
        time=BEGAN + (update + 0.9) * UPDATE,
        update=update,
        bytes_sent=2_770_000,
        bytes_received=2_770_000,
        messages_sent=6,
        messages_received=6,
        seconds=waiting + 0.05,
        waited_seconds=waiting,
    )


def _sample(second: int, rank: int) -> Sample:
    moved = second * 7_000_000
    traffic = InterfaceTraffic(bytes_sent=moved, bytes_received=moved + 10,
                              packets_sent=second * 900, packets_received=second * 950)  # fmt: skip
    still = InterfaceTraffic(bytes_sent=5, bytes_received=5, packets_sent=1, packets_received=1)
    return Sample(
        time=BEGAN + second,
        cpu=0.9 - 0.1 * math.sin(second + rank),
        busy=0.7,
        idle=0.28,
        iowait=0.02,
        resident=300_000_000 + 20_000_000 * rank + 1_000_000 * second,
        threads=4 + rank % 2,
        network={"eth0": traffic, "lo": still},
    )
