"""What rank-*/events.jsonl holds: one line per thing that happened on a rank; no torch.

`Start` opens a session (a training, or its continuation), `Span`, `Sample`, `Exchanged`, `Note`
and `Clock` fill it, `End` closes it when the rank came that far. Times are seconds since 1970 on
the clock of the rank's own host; `RankSession.common` brings them to the first rank's clock.
The format is described for other programs in docs/events.md.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from paceline.errors import ConfigError
from paceline.schema.codec import decode, encode
from paceline.schema.plain import parse_json

VERSION: Final = 1
FILE_NAME: Final = "events.jsonl"
LONGEST_LINE: Final = 2**20
"""Of an event; a sample of a hundred network interfaces has a hundredth of it."""

SpanName = Literal[
    "start_up",
    "proof",
    "read",
    "compute",
    "forward",
    "backward",
    "exchange",
    "wait",
    "optimizer",
    "evaluate",
    "checkpoint",
    "handover",
    "stand_by",
]
SPAN_NAMES: Final[tuple[str, ...]] = get_args(SpanName)


@dataclass(frozen=True, kw_only=True)
class Start:
    """A rank begins to train, or to go on."""

    rank: int
    node: int
    host: str
    pid: int
    time: float
    """When recording began."""
    began: float
    """Where the rank's wall time begins: at the start of its process where it has one to itself."""
    world_size: int = 1
    role: Literal["worker", "server"] = "worker"
    """A server holds weights for the workers and computes no gradients itself."""
    offset: float = 0.0
    """This host's clock minus the first rank's, in seconds."""
    uncertainty: float = 0.0
    """The true offset lies within plus or minus this; 0 where both read the same clock."""
    version: int = VERSION


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A later measurement of the offset: clocks drift, and some ranks meet only after the start."""

    time: float
    offset: float
    uncertainty: float


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that took time."""

    name: SpanName
    start: float
    seconds: float
    update: int | None = None
    waited_for: tuple[int, ...] = ()
    """The ranks that came last, where the one who waited knows them."""
    hidden_seconds: float = 0.0
    """Of an exchange: how much of it, from its start on, ran behind the backward pass."""
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    detail: str = ""
    """Which one, where there are several of a name: "gradients", "weights"."""

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True, kw_only=True)
class InterfaceTraffic:
    """One network interface since the machine started; the reader takes differences."""

    bytes_sent: int
    bytes_received: int
    packets_sent: int
    packets_received: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Resources at one moment; rates are means since the sample before."""

    time: float
    cpu: float
    """Cores that this process kept busy."""
    busy: float
    """Part (0 to 1) of the whole machine's core time that was used by anyone."""
    idle: float
    """Part of it that nobody used, waiting for disks left out."""
    iowait: float
    """Part of it that was idle because something waited for a disk."""
    resident: int
    """Bytes of memory that this process has in use."""
    threads: int
    network: Mapping[str, InterfaceTraffic] = field(default_factory=dict)
    """By interface, as this rank's network namespace sees them."""
    disk_read: int = 0
    """Bytes this process had read from disks since it began (page cache left out)."""
    disk_written: int = 0


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What one update moved between nodes, counted alike by every exchange.

    The lines of a session add up to all that its rank sent and received. What is neither of an
    update nor of start-up (evaluation, checkpoints) has no number.
    """

    time: float
    update: int | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    seconds: float = 0.0
    """While anything was on its way: hidden under computing or waited for."""
    waited_seconds: float = 0.0
    """Of those, while the computation stood still."""

    @property
    def hidden_seconds(self) -> float:
        """Seconds of communication that the computation did not wait for."""
        return max(0.0, self.seconds - self.waited_seconds)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training is: about one a second, from its first rank."""

    time: float
    update: int
    """Updates done."""
    updates: int
    """Updates that it is to have, as far as it is known now."""
    epoch: int
    """Whole epochs done."""
    samples: int = 0
    """Of the global batch of the newest update."""
    loss: float | None = None
    """Of this rank's part of the newest update."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something worth a sentence: shares rebalanced, a worker died, a stall."""

    time: float
    what: str
    """One word for programs: "stall", "shares", "worker"."""
    text: str
    """One or more sentences for people."""
    ranks: tuple[int, ...] = ()
    """Whom it is about."""
    update: int | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """The rank has ended in order; the line is missing where it was killed."""

    time: float


Event = Start | Clock | Span | Sample | Exchanged | Progress | Note | End

_KINDS: Final[dict[str, type[Event]]] = {
    "start": Start,
    "clock": Clock,
    "span": Span,
    "sample": Sample,
    "exchanged": Exchanged,
    "progress": Progress,
    "note": Note,
    "end": End,
}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}


def encode_line(event: Event) -> str:
    """One line of events.jsonl, its newline included.

    >>> encode_line(Span(name="read", start=1.5, seconds=0.25, update=3))
    '{"event": "span", "name": "read", "start": 1.5, "seconds": 0.25, "update": 3}\\n'
    """
    plain = {"event": _NAMES[type(event)]} | {
        key: value for key, value in encode(event).items() if not _is_left_out(event, key, value)
    }
    return json.dumps(plain) + "\n"


def _is_left_out(event: Event, key: str, value: Any) -> bool:
    """Most spans have neither bytes nor a detail: their lines are shorter without the defaults."""
    if not isinstance(event, Span | Exchanged | Note) or key in ("start", "seconds", "time"):
        return False
    # Update 0 is the first one, and says something, unlike 0 bytes.
    return value is None if key == "update" else value in (0, "", [])


_PLAIN_SPAN: Final = re.compile(
    r'\{"event": "span", "name": "(' + "|".join(SPAN_NAMES) + r')", "start": (\d{1,15}\.\d{1,17}),'
    r' "seconds": (\d{1,15}\.\d{1,17}), "update": (0|[1-9]\d{0,17})'
    r'(?:, "waited_for": \[(\d{1,6})\])?(?:, "detail": "([ a-z]{1,40})")?\}\n?',
    re.ASCII,
)
"""As `encode_line` writes most spans: thousands come in a second of short updates."""


def decode_line(text: str) -> Event | None:
    """The event of a line; None for half a line, and for what a later version may add."""
    if (plain := _PLAIN_SPAN.fullmatch(text)) is not None:
        name, start, seconds, update, waited_for, detail = plain.groups("")
        return Span(
            name=cast(SpanName, name),
            start=float(start),
            seconds=float(seconds),
            update=int(update),
            waited_for=(int(waited_for),) if waited_for else (),
            detail=detail,
        )
    try:
        data = parse_json(text)
    except ValueError:
        return None
    kind = _KINDS.get(str(data.pop("event", ""))) if isinstance(data, dict) else None
    if kind is None:
        return None
    known = kind.__dataclass_fields__
    try:
        event = decode(kind, {key: value for key, value in data.items() if key in known})
    except ConfigError:
        return None
    return event if _makes_sense(event) else None


def _makes_sense(event: Event) -> bool:
    if isinstance(event, Exchanged) and not math.isfinite(event.seconds + event.waited_seconds):
        return False
    if isinstance(event, Span):
        return math.isfinite(event.start) and math.isfinite(event.seconds) and event.seconds >= 0
    return math.isfinite(event.time)


@dataclass(frozen=True, kw_only=True)
class RankSession:
    """What one rank did from one start to its end."""

    start: Start
    spans: tuple[Span, ...] = ()
    samples: tuple[Sample, ...] = ()
    exchanged: tuple[Exchanged, ...] = ()
    notes: tuple[Note, ...] = ()
    clocks: tuple[Clock, ...] = ()
    end: End | None = None

    @property
    def rank(self) -> int:
        return self.start.rank

    @property
    def began(self) -> float:
        """Where the wall time begins, on this host's clock."""
        return self.start.began

    @functools.cached_property
    def ended(self) -> float:
        """The end, or the last thing known of a rank that was killed."""
        if self.end is not None:
            return max(self.end.time, self.began)
        return max(
            [self.start.time, self.began]
            + [span.end for span in self.spans]
            + [sample.time for sample in self.samples]
            + [note.time for note in self.notes]
            + [exchanged.time for exchanged in self.exchanged]
        )

    @property
    def seconds(self) -> float:
        """Wall time of the session."""
        return self.ended - self.began

    @functools.cached_property
    def _offsets(self) -> tuple[list[float], list[float]]:
        # Where the offset was measured later on, the start's zero was not a measurement.
        measured = [(clock.time, clock.offset) for clock in self.clocks]
        if not measured or self.start.uncertainty > 0:
            measured.append((self.start.time, self.start.offset))
        measured.sort()
        return [time for time, _ in measured], [offset for _, offset in measured]

    def offset(self, time: float) -> float:
        """This host's clock minus the first rank's: straight lines between measurements."""
        times, offsets = self._offsets
        after = bisect.bisect_right(times, time)
        if after == 0:
            return offsets[0]
        if after == len(times):
            return offsets[-1]
        part = (time - times[after - 1]) / (times[after] - times[after - 1])
        return offsets[after - 1] + part * (offsets[after] - offsets[after - 1])

    def common(self, time: float) -> float:
        """A time of this host on the first rank's clock."""
        return time - self.offset(time)


def read_lines(path: Path) -> Iterator[Event]:
    """The events of a file, in order; lines that are not whole are passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        # In pieces: a damaged file may be one line of any length.
        for line in iter(lambda: file.readline(LONGEST_LINE), ""):
            event = decode_line(line)
            if event is not None:
                yield event


def sessions(events: Iterable[Event]) -> list[RankSession]:
    """Events of one rank, divided where it started anew."""
    found: list[tuple[Start, list[Event]]] = []
    for event in events:
        if isinstance(event, Start):
            found.append((event, []))
        elif found:  # nothing can be said of events before the first start
            found[-1][1].append(event)
    return [
        RankSession(
            start=start,
            spans=tuple(e for e in group if isinstance(e, Span)),
            samples=tuple(e for e in group if isinstance(e, Sample)),
            exchanged=tuple(e for e in group if isinstance(e, Exchanged)),
            notes=tuple(e for e in group if isinstance(e, Note)),
            clocks=tuple(e for e in group if isinstance(e, Clock)),
            end=next((e for e in reversed(group) if isinstance(e, End)), None),
        )
        for start, group in found
    ]


def read_sessions(path: Path) -> list[RankSession]:
    """The sessions of one events.jsonl, oldest first."""
    return sessions(read_lines(path))


def read_run(run: Path) -> dict[int, list[RankSession]]:
    """The sessions of every rank of a run directory, by rank; ranks without a start left out.

    >>> {rank: sessions[-1].seconds for rank, sessions in read_run(run).items()}  # doctest: +SKIP
    {0: 61.2, 1: 61.1}
    """
    found = {}
    for folder in run.glob("rank-*"):
        if match := re.fullmatch(r"rank-(\d+)", folder.name):
            found[int(match.group(1))] = read_sessions(folder / FILE_NAME)
    return {rank: found[rank] for rank in sorted(found) if found[rank]}


def newest_sessions(run: Path) -> list[RankSession]:
    """Each rank's last session: what a run is looked at by, unless its whole past is wanted."""
    return [past[-1] for past in read_run(run).values()]
