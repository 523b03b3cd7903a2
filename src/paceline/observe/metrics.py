"""metrics.jsonl: one line per epoch, readable by any program."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.errors import shown
from paceline.run import write_whole
from paceline.schema.plain import parse_json

_LINE_NUMBERS: Final = (
    "epoch",
    "seconds",
    "read_seconds",
    "update_seconds_median",
    "images_per_second",
)
"""What lines are sorted and summed up by."""


@dataclass
class Tally:
    """Sums over one epoch on one rank."""

    loss_sum: float = 0.0
    correct: float = 0.0
    """NaN where there are no classes."""
    samples: int = 0
    weight: float = 0.0
    """By what the losses are means: as a rule, samples."""
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    """What else is reported: by name, a sum and its count."""
    seconds: float = 0.0
    """Time in the training loop, evaluation and checkpoints left out."""
    read_seconds: float = 0.0
    """Time the loop stood still for data."""
    updates: int = 0
    durations: list[float] = field(default_factory=list)
    """Seconds of each update since this process started the epoch."""

    def add(
        self,
        *,
        loss_sum: float,
        correct: float,
        samples: int,
        weight: float | None = None,
        sums: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self.loss_sum += loss_sum
        self.correct += correct
        self.samples += samples
        self.weight += samples if weight is None else weight
        for name, (total, count) in (sums or {}).items():
            before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (before[0] + total, before[1] + count)
        self.updates += 1

    def saved(self) -> dict[str, float]:
        """What a checkpoint in the middle of the epoch keeps."""
        return {
            "loss_sum": self.loss_sum,
            "correct": self.correct,
            "samples": self.samples,
            "weight": self.weight,
            "seconds": self.seconds,
            "read_seconds": self.read_seconds,
            "updates": self.updates,
            **saved_sums(self.sums),
        }

    @classmethod
    def restored(cls, saved: Mapping[str, float]) -> Tally:
        """The tally that `saved` described; without `correct` there were no classes."""
        missing = math.nan if saved.get("samples") else 0.0
        return cls(
            loss_sum=saved.get("loss_sum", 0.0),
            correct=saved.get("correct", missing),
            samples=int(saved.get("samples", 0)),
            weight=saved.get("weight", saved.get("samples", 0.0)),
            sums={
                name: (saved[f"{name} sum"], saved[f"{name} count"])
                for name in (key.removesuffix(" sum") for key in saved if key.endswith(" sum"))
                if f"{name} count" in saved
            },
            seconds=saved.get("seconds", 0.0),
            read_seconds=saved.get("read_seconds", 0.0),
            updates=int(saved.get("updates", 0)),
        )

    def times(self) -> dict[str, float]:
        """What the epoch's line says about time."""
        return {
            "seconds": self.seconds,
            "read_seconds": self.read_seconds,
            "update_seconds_mean": self.update_mean,
            "update_seconds_median": self.update_median,
        }

    @property
    def update_mean(self) -> float:
        return statistics.fmean(self.durations) if self.durations else 0.0

    @property
    def update_median(self) -> float:
        return statistics.median(self.durations) if self.durations else 0.0


def saved_sums(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Sums and counts by name, as a checkpoint keeps them.

    >>> saved_sums({"mae": (1.5, 4.0)})
    {'mae sum': 1.5, 'mae count': 4.0}
    """
    found: dict[str, float] = {}
    for name, (total, count) in sums.items():
        found |= {f"{name} sum": total, f"{name} count": count}
    return found


TIMES: Final = ("seconds", "read_seconds", "update_seconds_median", "images_per_second")
"""What the summary of a run adds up: a line without is damaged."""


class MetricsFile:
    """The lines of metrics.jsonl; lines that could not be written are tried again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self._written = 0

    def restore(self, epochs: int) -> None:
        """Keep what a resumed run had written about its first `epochs` epochs."""
        self.lines = [
            line
            for line in read_metrics(self.path)
            if line["epoch"] <= epochs and all(type(line.get(key)) is float for key in TIMES)
        ]
        self._written = len(self.lines)
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        if not self.path.exists() or self.path.read_bytes() == text.encode():
            return
        write_whole(self.path, text)  # a run that is killed here must not lose its past

    def append(self, line: dict[str, Any]) -> None:
        """Add a line; OSError leaves it to be written with the next one."""
        self.lines.append(line)
        whole = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in self.lines[self._written :])
        except OSError:
            if self.path.exists():  # the next line must not be joined to half of this one
                os.truncate(self.path, whole)
            raise
        self._written = len(self.lines)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the half line of a killed run, or a damaged one, is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            lines.append(_whole_line(parse_json(text)))
    return lines


def _whole_line(line: Any) -> dict[str, Any]:
    """A line that `totals` can sum up; ValueError where it has other things than numbers."""
    if not isinstance(line, dict):
        raise ValueError(f"it is {shown(line)}, not a table of keys")
    for key in (*_LINE_NUMBERS, *EXCHANGE_KEYS):
        value = line.get(key, None if key == "epoch" else 0)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{key} is {shown(value)}, not a number")
    return line


EXCHANGE_KEYS: Final = (
    "bytes_sent",
    "bytes_received",
    "messages_sent",
    "messages_received",
    "exchange_seconds",
    "exchange_hidden_seconds",
    "exchange_wait_seconds",
)
"""What every exchange is counted by: bytes and messages of all nodes, mean seconds of a worker."""


def exchange_counts(traffic: Any) -> list[float]:
    """One node's numbers of an epoch (`exchange.network.Traffic`), in the order of the keys."""
    return [
        float(traffic.bytes_sent),
        float(traffic.bytes_received),
        float(traffic.messages_sent),
        float(traffic.messages_received),
        traffic.seconds,
        traffic.hidden,
        traffic.waited,
    ]


def exchange_line(summed: Sequence[float], nodes: int) -> dict[str, float]:
    """The epoch's line about the exchange, from the sums of `exchange_counts` over all nodes."""
    return {
        key: value / nodes if key.endswith("seconds") else int(value)
        for key, value in zip(EXCHANGE_KEYS, summed, strict=True)
    }


def totals(lines: Sequence[Mapping[str, Any]], *, open_seconds: float) -> dict[str, Any]:
    """What the epochs of a run come to, for run.json; `open_seconds` went into opening the data."""
    last = lines[-1] if lines else {}

    def median(key: str) -> float:
        values = [line[key] for line in lines if key in line]
        return statistics.median(values) if values else 0.0

    exchanged = {
        key: sum(line[key] for line in lines)
        for key in EXCHANGE_KEYS
        if lines and all(key in line for line in lines)
    }
    return {
        **exchanged,
        "read_seconds": open_seconds + sum(line.get("read_seconds", 0.0) for line in lines),
        "update_seconds_median": median("update_seconds_median"),
        "epoch_seconds_median": median("seconds"),
        "images_per_second": median("images_per_second"),
        **{key: last.get(key) for key in ("train_loss", "test_loss", "test_accuracy", "test_top5")},
        **{key: last[key] for key in last if key.startswith(("train_", "test_"))},
        **(
            {"unit": last["unit"], "units_per_second": median("units_per_second")}
            if "unit" in last
            else {}
        ),
    }
