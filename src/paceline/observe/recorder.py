"""Writes rank-N/events.jsonl while a rank trains, at a cost of microseconds per span.

The training thread only appends to a queue; a thread of its own turns what is there into
lines about twice a second, and takes the resource samples. Nothing is forced onto the disk:
what a killed machine loses is at most the last half second.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from paceline.observe.samples import make_sampler
from paceline.schema import RankContext
from paceline.schema.events import (
    FILE_NAME,
    Clock,
    End,
    Event,
    Exchanged,
    Note,
    Progress,
    Sample,
    SpanName,
    Start,
    encode_line,
)

if TYPE_CHECKING:
    from paceline.exchange.network import Traffic

FLUSH_SECONDS: Final = 0.5
SHORTEST_WAIT: Final = 10e-6
"""A barrier that was passed faster is not worth a line: nobody waited."""
_MOST_PENDING: Final = 500_000
"""Events held in memory while a disk hangs; older ones are given up first."""

_Entry = tuple[str, float, float, int | None, dict[str, Any] | None]
Sampler = Callable[[float], Sample | None]
Say = Callable[[str], None]


class Recorder:
    """What the training loop tells of itself; this one listens to nothing.

    Times that are handed in (`started`) are those of `time.perf_counter()`.

    >>> recorder = Recorder()
    >>> with recorder.span("compute", update=3):
    ...     pass
    """

    enabled = False
    update: int | None = None
    """The update that spans without one of their own belong to."""

    def span(
        self, name: SpanName, *, update: int | None = None, detail: str = ""
    ) -> contextlib.AbstractContextManager[object]:
        """Time a block."""
        return _NOTHING

    def add(
        self,
        name: SpanName,
        started: float,
        seconds: float,
        *,
        update: int | None = None,
        **fields: Any,
    ) -> None:
        """A span that was timed elsewhere; `fields` are those of `schema.events.Span`."""

    def waited(self, operation: str, started: float, seconds: float, late: Sequence[int]) -> None:
        """This rank waited in `operation` for the ranks in `late`, the last to come."""

    def exchanged(self, update: int | None, traffic: Traffic) -> None:
        """What was moved between nodes for an update, or for none of them."""

    def progress(
        self, update: int, updates: int, epoch: int, samples: int, loss: float | None
    ) -> None:
        """How far the training is; only the newest word of it is written, with the samples."""

    def note(self, what: str, text: str, ranks: Sequence[int] = ()) -> None:
        """Something worth a sentence."""

    def clock(self, offset: float, uncertainty: float) -> None:
        """The offset of this host's clock to the first rank's was measured just now."""

    def ready(self) -> None:
        """Start-up is over; what comes now is training."""

    def now(self) -> float:
        """Seconds since 1970 on the clock of the events."""
        return time.time()

    def close(self) -> None:
        """Write what is left."""

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_NOTHING: Final = contextlib.nullcontext()


class FileRecorder(Recorder):
    """Records into a rank's folder. Whatever happens to the disk, training goes on."""

    enabled = True

    def __init__(
        self,
        folder: Path,
        start: Start,
        *,
        sampler: Sampler | None = None,
        samples_every: float = 1.0,
        say: Say = print,
    ) -> None:
        """`start.time` is replaced by the moment of this call."""
        self.path = folder / FILE_NAME
        self._say = say
        self._sampler, self._samples_every = sampler, samples_every
        self._unix, self._counter = time.time(), time.perf_counter()
        self._shift = self._unix - self._counter
        self._began = start.began - self._shift
        self._pending: collections.deque[_Entry | Event] = collections.deque(maxlen=_MOST_PENDING)
        self._progress: tuple[float, int, int, int, int, float | None] | None = None
        self._lost = 0
        self._warned = False
        self._whole: int | None = None  # size of the file up to its last whole line
        self._closing = threading.Event()
        self._closed = False
        # Kept until it is written: without it nothing could be made of what follows.
        self._start: Start | None = dataclasses.replace(start, time=self._unix)
        self._thread = threading.Thread(target=self._work, name="paceline-events", daemon=True)
        self._thread.start()

    # --- called by the training thread ---------------------------------------

    def now(self) -> float:
        return self._shift + time.perf_counter()

    def span(self, name: SpanName, *, update: int | None = None, detail: str = "") -> _Timing:
        return _Timing(self, name, update, detail)

    def add(
        self,
        name: SpanName,
        started: float,
        seconds: float,
        *,
        update: int | None = None,
        **fields: Any,
    ) -> None:
        if update is None:
            update = self.update
        self._pending.append((name, started, seconds, update, fields or None))

    def waited(self, operation: str, started: float, seconds: float, late: Sequence[int]) -> None:
        if seconds >= SHORTEST_WAIT:
            fields = {"waited_for": tuple(late), "detail": operation}
            self._pending.append(("wait", started, seconds, self.update, fields))

    def exchanged(self, update: int | None, traffic: Traffic) -> None:
        now = time.perf_counter()
        # Waiting that an exchange has counted without saying when belongs to the end of its update.
        untold = traffic.waited - traffic.told
        if untold >= SHORTEST_WAIT:
            self.add("exchange", now - untold, untold, update=update, detail="an exchange")
        self._pending.append(
            Exchanged(
                time=self._shift + now,
                update=update,
                bytes_sent=traffic.bytes_sent,
                bytes_received=traffic.bytes_received,
                messages_sent=traffic.messages_sent,
                messages_received=traffic.messages_received,
                seconds=traffic.seconds,
                waited_seconds=traffic.waited,
            )
        )

    def progress(
        self, update: int, updates: int, epoch: int, samples: int, loss: float | None
    ) -> None:
        self._progress = (time.perf_counter(), update, updates, epoch, samples, loss)

    def note(self, what: str, text: str, ranks: Sequence[int] = ()) -> None:
        self._pending.append(
            Note(time=self.now(), what=what, text=text, ranks=tuple(ranks), update=self.update)
        )

    def clock(self, offset: float, uncertainty: float) -> None:
        self._pending.append(Clock(time=self.now(), offset=offset, uncertainty=uncertainty))

    def ready(self) -> None:
        self.add("start_up", self._began, time.perf_counter() - self._began)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._thread.join()

    # --- the thread that writes ----------------------------------------------

    def _work(self) -> None:
        next_sample = time.perf_counter()
        every = self._samples_every if self._samples_every > 0 else 1.0
        while True:
            last = self._closing.wait(FLUSH_SECONDS)
            if last or time.perf_counter() >= next_sample:
                next_sample = max(next_sample, time.perf_counter() - 1) + every
                if self._sampler is not None:
                    self._take_sample(self._sampler)
                self._take_progress()
            if last:
                self._pending.append(End(time=self.now()))
            self._write()
            if last:
                return

    def _take_sample(self, sampler: Sampler) -> None:
        try:
            sample = sampler(self.now())
        except (OSError, ValueError, IndexError) as error:
            self._warn(f"resources cannot be sampled: {error}")
            self._sampler = None
            return
        if sample is not None:
            self._pending.append(sample)

    def _take_progress(self) -> None:
        taken, self._progress = self._progress, None
        if taken is not None:
            at, update, updates, epoch, samples, loss = taken
            self._pending.append(
                Progress(
                    time=self._shift + at,
                    update=update,
                    updates=updates,
                    epoch=epoch,
                    samples=samples,
                    loss=loss if loss is None or math.isfinite(loss) else None,
                )
            )

    def _write(self) -> None:
        lines = [self._line(entry) for entry in self._taken()]
        if not lines and self._start is None:
            return
        head = [] if self._start is None else [encode_line(self._start)]
        if self._lost:
            text = f"{self._lost} events are missing before this: they could not be written"
            head.append(encode_line(Note(time=self.now(), what="lost", text=text)))
        try:
            self._append("".join(head + lines).encode())
        except OSError as error:
            self._lost += len(lines)
            self._warn(f"{self.path} cannot be written: {error.strerror}; training goes on")
        else:
            self._lost, self._start = 0, None

    def _taken(self) -> Iterator[_Entry | Event]:
        for _ in range(len(self._pending)):
            yield self._pending.popleft()

    def _line(self, entry: _Entry | Event) -> str:
        if isinstance(entry, Exchanged):
            return _exchanged_line(entry)
        if not isinstance(entry, tuple):
            return encode_line(entry)
        name, started, seconds, update, fields = entry
        text = (
            f'{{"event": "span", "name": "{name}", "start": {self._shift + started:.6f},'
            f' "seconds": {max(seconds, 0.0):.7f}'
        )
        if update is not None:
            text += f', "update": {update}'
        for key, value in (fields or {}).items():
            if value:
                text += f', "{key}": {json.dumps(value)}'
        return text + "}\n"

    def _append(self, data: bytes) -> None:
        """Add whole lines or none: what a full disk took half of is cut off again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if self._whole is None and size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data  # an earlier session was killed within a line
            self._whole = size
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, self._whole)
                raise
        finally:
            os.close(descriptor)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._say(f"warning: {text}")


def _exchanged_line(entry: Exchanged) -> str:
    """As `encode_line` writes it, in a tenth of the time: there is one for every update."""
    text = f'{{"event": "exchanged", "time": {entry.time:.6f}'
    for key in ("update", "bytes_sent", "bytes_received", "messages_sent", "messages_received"):
        value = getattr(entry, key)
        if value or (key == "update" and value is not None):
            text += f', "{key}": {value}'
    return (
        f'{text}, "seconds": {entry.seconds:.7f}, "waited_seconds": {entry.waited_seconds:.7f}}}\n'
    )


def make_recorder(
    folder: Path,
    context: RankContext,
    *,
    events: bool = True,
    samples_every: float = 1.0,
    began: float | None = None,
    role: Literal["worker", "server"] = "worker",
    host: str | None = None,
    say: Say = print,
) -> Recorder:
    """The recorder of a rank whose folder is `folder`; one that listens to nothing if so asked.

    `began`: where the rank's wall time begins, if not now (see `samples.process_began`).
    `host`: what the user calls this machine, if not by its own name.
    """
    if not events:
        return Recorder()
    now = time.time()
    start = Start(
        rank=context.rank,
        node=context.node,
        host=host or socket.gethostname(),
        pid=os.getpid(),
        time=now,
        began=now if began is None else began,
        world_size=context.world_size,
        role=role,
    )
    sampler = make_sampler() if samples_every > 0 else None
    return FileRecorder(folder, start, sampler=sampler, samples_every=samples_every, say=say)


def board_listener(
    recorder: Recorder, context: RankContext
) -> Callable[[str, float, float, Sequence[int]], None]:
    """What a node's board calls after a wait: its ranks are numbered within the node."""
    first = context.rank - context.local_rank

    def listen(operation: str, started: float, seconds: float, late: Sequence[int]) -> None:
        recorder.waited(operation, started, seconds, [first + local for local in late])

    return listen


class _Timing:
    """What `span` gives back; an exception inside does not hide the time it took."""

    __slots__ = ("_detail", "_name", "_recorder", "_started", "_update")

    def __init__(
        self, recorder: FileRecorder, name: SpanName, update: int | None, detail: str
    ) -> None:
        self._recorder, self._name, self._update, self._detail = recorder, name, update, detail
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._started
        recorder = self._recorder
        update = recorder.update if self._update is None else self._update
        fields = {"detail": self._detail} if self._detail else None
        recorder._pending.append((self._name, self._started, seconds, update, fields))
