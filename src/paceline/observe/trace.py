"""Events of all ranks as a trace that Perfetto and Chrome draw: ranks side by side; no torch.

The format is Chrome's "JSON object format". Ranks are its processes, on the common clock: spans
are complete events ("X", microseconds), notes instants ("i"), resources counters ("C").
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.run import write_whole
from paceline.schema.events import RankSession, Sample, Span

Record = dict[str, Any]

_TRACKS: Final = {"training": 0, "exchange": 100}
_TOLERANCE: Final = 2.0
"""Microseconds by which rounding may push the end of an inner span over that of the outer one."""
_MEGA: Final = 1e6


def make_trace(sessions: Sequence[RankSession]) -> dict[str, Any]:
    """The trace of these sessions, its events in order of time, the names first."""
    origin = min((s.common(s.began) for s in sessions), default=0.0)
    names = [record for session in sessions for record in _names(session)]
    events = [
        record
        for session in sessions
        for record in (
            *_spans(session, origin),
            *_notes(session, origin),
            *_counters(session, origin),
            *_exchanged(session, origin),
        )
    ]
    # Longer ones first where two begin together: the outer before the inner one.
    events.sort(key=lambda record: (record["ts"], -record.get("dur", 0.0)))
    lanes = sorted({(e["pid"], e["tid"]) for e in events if e["ph"] == "X"})
    names += [_lane_name(pid, tid) for pid, tid in lanes]
    return {
        "traceEvents": names + events,
        "displayTimeUnit": "ms",
        "otherData": {"origin_unix_seconds": origin, "made_by": "paceline trace"},
    }


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write the trace, whole or not at all; compressed if the name ends in .gz."""
    data = json.dumps(trace, separators=(",", ":")).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6)
    write_whole(path, data)


def _names(session: RankSession) -> Iterator[Record]:
    start = session.start
    for name, arguments in (
        ("process_name", {"name": f"rank {start.rank} (host {start.host})"}),
        ("process_labels", {"labels": f"node {start.node}, pid {start.pid}"}),
        ("process_sort_index", {"sort_index": start.rank}),
    ):
        yield {"name": name, "ph": "M", "pid": start.rank, "tid": 0, "ts": 0, "args": arguments}


def _lane_name(pid: int, tid: int) -> Record:
    track = "exchange" if tid >= _TRACKS["exchange"] else "training"
    number = tid - _TRACKS[track]
    name = track if number == 0 else f"{track} {number + 1}"
    return {
        "name": "thread_name",
        "ph": "M",
        "pid": pid,
        "tid": tid,
        "ts": 0,
        "args": {"name": name},
    }


def _spans(session: RankSession, origin: float) -> Iterator[Record]:
    lanes = {track: Lanes(first) for track, first in _TRACKS.items()}
    timed = []
    for span in session.spans:
        start = _microseconds(session, span.start, origin)
        timed.append((start, round(start + span.seconds * 1e6, 3), span))
    timed.sort(key=lambda entry: (entry[0], -entry[1]))
    placed = [
        (lanes["exchange" if span.name == "exchange" else "training"].place(start, end), span)
        for start, end, span in timed
    ]
    for place, span in placed:
        yield {
            "name": span.name if not span.detail else f"{span.name} {span.detail}",
            "cat": span.name,
            "ph": "X",
            "pid": session.rank,
            "tid": place.lane,
            "ts": place.start,
            "dur": round(place.end - place.start, 3),
            "args": _arguments(span),
        }


def _microseconds(session: RankSession, time: float, origin: float) -> float:
    """Nanosecond digits, and never before the origin: a clock's offset may be known to less."""
    return max(round((session.common(time) - origin) * 1e6, 3), 0.0)


@dataclass
class PlacedSpan:
    """A span on its lane, in microseconds."""

    lane: int
    start: float
    end: float


class Lanes:
    """Puts spans that overlap without lying in each other on lanes of their own.

    A viewer draws what lies in each other as a stack; anything else on one lane it garbles.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._open: list[list[PlacedSpan]] = []

    def place(self, start: float, end: float) -> PlacedSpan:
        """The place of the next span, by start, outer ones first.

        Rounding is put right: an end is moved to the start that follows it within the tolerance,
        or to the end of the span that it lies in. So a place is final only after the last call.

        >>> lanes = Lanes(0)
        >>> placed = [lanes.place(*s) for s in [(0, 100), (20, 50), (80, 140), (99, 130)]]
        >>> [(span.lane, span.start, span.end) for span in placed]
        [(0, 0, 99), (0, 20, 50), (1, 80, 140), (0, 99, 130)]
        """
        for number, around in enumerate(self._open):
            while around and around[-1].end <= start + _TOLERANCE and around[-1].end < end:
                over = around.pop()
                over.end = min(over.end, start)
            if not around or end <= around[-1].end + _TOLERANCE:
                end = min(end, around[-1].end) if around else end
                around.append(PlacedSpan(self._first + number, start, end))
                return around[-1]
        self._open.append([PlacedSpan(self._first + len(self._open), start, end)])
        return self._open[-1][-1]


def _arguments(span: Span) -> Record:
    found: Record = {} if span.update is None else {"update": span.update}
    if span.waited_for:
        found["waited_for"] = ", ".join(f"rank {rank}" for rank in span.waited_for)
    for key in ("hidden_seconds", "bytes_sent", "bytes_received", "messages"):
        if value := getattr(span, key):
            found[key] = value
    return found


def _notes(session: RankSession, origin: float) -> Iterator[Record]:
    for note in session.notes:
        yield {
            "name": note.what,
            "cat": "note",
            "ph": "i",
            "s": "p",
            "pid": session.rank,
            "tid": 0,
            "ts": _microseconds(session, note.time, origin),
            "args": {"text": note.text},
        }


def _counters(session: RankSession, origin: float) -> Iterator[Record]:
    before: Sample | None = None
    for sample in session.samples:
        ts = _microseconds(session, sample.time, origin)
        for name, values in _values(sample, before):
            yield {
                "name": name,
                "cat": "resources",
                "ph": "C",
                "pid": session.rank,
                "tid": 0,
                "ts": ts,
                "args": values,
            }
        before = sample


def _exchanged(session: RankSession, origin: float) -> Iterator[Record]:
    """What each update moved between nodes, and what of the time was hidden or waited for."""
    for line in session.exchanged:
        if line.update is None:
            continue
        for name, values in (
            (
                "exchange per update (MB)",
                {"sent": line.bytes_sent / _MEGA, "received": line.bytes_received / _MEGA},
            ),
            (
                "exchange per update (ms)",
                {"hidden": line.hidden_seconds * 1e3, "waited": line.waited_seconds * 1e3},
            ),
        ):
            yield {
                "name": name,
                "cat": "exchange",
                "ph": "C",
                "pid": session.rank,
                "tid": 0,
                "ts": _microseconds(session, line.time, origin),
                "args": {key: round(value, 3) for key, value in values.items()},
            }


def _values(sample: Sample, before: Sample | None) -> Iterable[tuple[str, dict[str, float]]]:
    yield "CPU of the rank (cores)", {"cores": round(sample.cpu, 3)}
    machine = {"busy": sample.busy, "I/O wait": sample.iowait}
    yield "CPU of the machine (%)", {key: round(100 * part, 1) for key, part in machine.items()}
    yield "memory (MB)", {"resident": round(sample.resident / _MEGA, 1)}
    yield "threads", {"threads": sample.threads}
    if before is None or sample.time <= before.time:
        return
    seconds = sample.time - before.time
    for name, now in sample.network.items():
        if name not in before.network:
            continue
        past = before.network[name]
        sent, received = now.bytes_sent - past.bytes_sent, now.bytes_received - past.bytes_received
        yield (
            f"network {name} (MB/s)",
            {"sent": _rate(sent, seconds), "received": _rate(received, seconds)},
        )
    read, written = sample.disk_read - before.disk_read, sample.disk_written - before.disk_written
    yield "disk (MB/s)", {"read": _rate(read, seconds), "written": _rate(written, seconds)}


def _rate(amount: int, seconds: float) -> float:
    return round(amount / seconds / _MEGA, 3)
