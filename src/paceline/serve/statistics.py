"""What a server has done: counts and latencies, for Prometheus and for the page."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from typing import Any

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds: upper ends of the histogram's buckets, as Prometheus's libraries have them."""
RECENT = 2048
"""Requests that quantiles are taken of."""
MOST = 256
"""Versions that are counted, so that a training that publishes for weeks takes no memory."""
SPAN = 10.0
"""Seconds that rates are taken over."""


class Record:
    """Requests to one version of a model."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0
        self.samples = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def note(self, code: int, seconds: float, samples: int) -> None:
        self.codes[code] = self.codes.get(code, 0) + 1
        self.buckets[bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds
        self.samples += samples
        self._recent.append((time.monotonic(), seconds))

    def forget(self) -> None:
        """Drop single requests that no rate is taken over any more."""
        now = time.monotonic()
        while self._recent and now - self._recent[0][0] > SPAN:
            self._recent.popleft()

    def lately(self) -> dict[str, float]:
        """Requests per second, and how long they took."""
        now = time.monotonic()
        times = sorted(seconds for when, seconds in self._recent if now - when <= SPAN)
        if not times:
            return {"rate": 0.0, "p50": 0.0, "p99": 0.0}
        oldest = next(when for when, _ in self._recent if now - when <= SPAN)
        # Under load the recent requests reach back less far than the span.
        full = len(self._recent) == RECENT and oldest == self._recent[0][0]
        span = max(now - oldest, 1e-3) if full else SPAN
        return {
            "rate": len(times) / span,
            "p50": times[len(times) // 2],
            "p99": times[min(len(times) - 1, int(len(times) * 0.99))],
        }


class Statistics:
    """All versions, and what was refused before one was found."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], Record] = {}
        self.refused: dict[int, int] = {}

    def of(self, name: str, number: int) -> Record:
        """The record of a version; counts of versions that are gone stay, as Prometheus wants."""
        found = self.records.get((name, number))
        if found is None:
            for other in self.records.values():
                other.forget()
            while len(self.records) >= MOST:
                del self.records[next(iter(self.records))]
            found = self.records[(name, number)] = Record()
        return found

    def refuse(self, code: int) -> None:
        """A request that no version was asked for."""
        self.refused[code] = self.refused.get(code, 0) + 1


def prometheus(statistics: Statistics, versions: list[dict[str, Any]]) -> str:
    """The text that Prometheus reads; `versions` is what the manager knows of them."""
    lines: list[str] = []

    def family(name: str, kind: str, text: str) -> None:
        lines.extend([f"# HELP paceline_{name} {text}", f"# TYPE paceline_{name} {kind}"])

    family("requests_total", "counter", "Requests that were answered, by status.")
    for (model, number), record in statistics.records.items():
        where = f'model="{model}",version="{number}"'
        for code, count in sorted(record.codes.items()):
            lines.append(f'paceline_requests_total{{{where},code="{code}"}} {count}')
    family("refused_total", "counter", "Requests that reached no version, by status.")
    for code, count in sorted(statistics.refused.items()):
        lines.append(f'paceline_refused_total{{code="{code}"}} {count}')
    family("samples_total", "counter", "Samples that were computed.")
    for (model, number), record in statistics.records.items():
        lines.append(
            f'paceline_samples_total{{model="{model}",version="{number}"}} {record.samples}'
        )
    family("request_seconds", "histogram", "Time from a request's arrival to its answer.")
    for (model, number), record in statistics.records.items():
        where = f'model="{model}",version="{number}"'
        total = 0
        for end, count in zip((*map(str, BUCKETS), "+Inf"), record.buckets, strict=True):
            total += count
            lines.append(f'paceline_request_seconds_bucket{{{where},le="{end}"}} {total}')
        lines.append(f"paceline_request_seconds_sum{{{where}}} {record.seconds}")
        lines.append(f"paceline_request_seconds_count{{{where}}} {total}")
    family("queued_samples", "gauge", "Samples that wait before a version.")
    family_lines = [one for one in versions if one["state"] == "AVAILABLE"]
    for one in family_lines:
        where = f'model="{one["model"]}",version="{one["version"]}"'
        lines.append(f"paceline_queued_samples{{{where}}} {one['queued']}")
    family("batches_total", "counter", "Batches that were computed, by size.")
    for one in family_lines:
        where = f'model="{one["model"]}",version="{one["version"]}"'
        for size, count in sorted(one["batches"].items()):
            lines.append(f'paceline_batches_total{{{where},size="{size}"}} {count}')
    family("version_available", "gauge", "1 for a version that answers, 0 for one that does not.")
    for one in versions:
        where = f'model="{one["model"]}",version="{one["version"]}"'
        lines.append(f"paceline_version_available{{{where}}} {int(one['state'] == 'AVAILABLE')}")
    return "\n".join(lines) + "\n"
