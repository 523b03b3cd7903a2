"""The life of versions: loaded before the old one goes, named when they fail, drained at the end.

    START ──> LOADING ──> AVAILABLE ──> UNLOADING ──> END
                 └──────────────────────────────────> END (with the reason)

A version that is served no longer is unloaded once another of its model answers, after its last
request. One that cannot be loaded is tried again when its files change.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from paceline.errors import PacelineError
from paceline.local.memory import give_back_memory
from paceline.schema.version import Serving, Version
from paceline.serve.batcher import Batcher
from paceline.serve.loader import Servable, explained, load, load_run
from paceline.serve.source import Found, VersionPlace
from paceline.serve.versions import served_numbers

State = Literal["START", "LOADING", "AVAILABLE", "UNLOADING", "END"]


class NotServedError(Exception):
    """There is no such model, version or label, or it does not answer yet."""

    def __init__(self, reason: str, *, known: bool = False) -> None:
        super().__init__(reason)
        self.known = known
        """It exists, and may answer later."""


@dataclass(eq=False)
class Entry:
    """One version of a model."""

    name: str
    number: int
    place: VersionPlace
    state: State = "START"
    error: str = ""
    about: Version | None = None
    batcher: Batcher | None = None
    size: int = 0
    in_flight: int = 0
    last_used: float = 0.0
    evicted: bool = False
    """It was unloaded for memory, and is loaded again when it is asked for."""
    task: asyncio.Task[None] | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Model:
    """The versions of one model."""

    name: str
    serving: Serving = field(default_factory=Serving)
    entries: dict[int, Entry] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)
    """The versions that are to be served, as far as they can be loaded."""
    problem: str = ""

    def available(self) -> list[int]:
        return sorted(n for n, e in self.entries.items() if e.state == "AVAILABLE" or e.evicted)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How versions are loaded and asked."""

    device: str = "cpu"
    batch: int | None = None
    """Samples of a batch at most; None: measured."""
    wait: float = 0.002
    """Seconds that part of a batch waits for more while others are computed."""
    queue: int = 1024
    """Samples that may wait before a version."""
    memory: int | None = None
    """Bytes of models that are loaded at once."""


class Manager:
    """All models, and which version answers whom."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self.options, self.say = options, say
        self.models: dict[str, Model] = {}
        self.dice = random.Random()
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="paceline-load")
        self._tasks: set[asyncio.Task[None]] = set()
        self.looked = False
        """The folders were looked at once, and what was there then was tried."""

    @property
    def _entries(self) -> list[Entry]:
        return [entry for model in self.models.values() for entry in model.entries.values()]

    async def follow(self, found: list[Found]) -> bool:
        """Load and unload as the folders say; whether a version could not be loaded.

        Then the next look may choose another in its place.
        """
        seen = {one.name for one in found}
        for one in found:
            self._follow_one(one)
        for name in [name for name in self.models if name not in seen]:
            self._follow_one(Found(name=name, versions={}))
        loading = [e for e in self._entries if e.task is not None and not e.task.done()]
        if loading:
            await asyncio.wait([e.task for e in loading if e.task is not None])
        for model in list(self.models.values()):
            self._retire(model)
        failed = any(entry.error for entry in loading)
        self.looked = self.looked or not failed
        return failed

    def _follow_one(self, found: Found) -> None:
        model = self.models.setdefault(found.name, Model(found.name))
        if found.problem and found.problem != model.problem:
            self.say(f"warning: {found.problem}; {found.name} is served as before")
        model.problem = found.problem
        if not found.problem:
            model.serving = found.serving
        for number, entry in list(model.entries.items()):
            place = found.versions.get(number)
            again = place is not None and place.stamp != entry.place.stamp
            if entry.state == "END" and (place is None or again) and not entry.in_flight:
                del model.entries[number]  # gone, or to be tried again
        good = [n for n in sorted(found.versions) if not self._failed(model, n)]
        wanted = served_numbers(model.serving, good)
        for number in wanted:
            entry_or_none = model.entries.get(number)
            if entry_or_none is None or (
                entry_or_none.state == "END" and not entry_or_none.error
                and not entry_or_none.evicted
            ):  # fmt: skip
                model.entries[number] = Entry(found.name, number, found.versions[number])
                self._load(model, model.entries[number])
        model.wanted = set(wanted)
        for number, entry in model.entries.items():
            entry.evicted = entry.evicted and number in model.wanted

    @staticmethod
    def _failed(model: Model, number: int) -> bool:
        entry = model.entries.get(number)
        return entry is not None and entry.state == "END" and bool(entry.error)

    def _load(self, model: Model, entry: Entry) -> None:
        entry.state = "LOADING"  # what was evicted stays so until then: requests wait for it
        entry.task = self._spawn(self._loaded(model, entry))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _loaded(self, model: Model, entry: Entry) -> None:
        loop = asyncio.get_running_loop()
        try:
            servable = await loop.run_in_executor(self._loading, self._open, entry)
        except PacelineError as error:
            entry.state, entry.error, entry.evicted = "END", str(error), False
            self.say(f"warning: {model.name} version {entry.number} is not served: {error}")
            return
        entry.about, entry.size = servable.about, servable.size
        entry.batcher = Batcher(servable, queue=self.options.queue, wait=self.options.wait)
        entry.state, entry.last_used, entry.evicted = "AVAILABLE", time.monotonic(), False
        setup = servable.setup
        self.say(
            f"{model.name} version {entry.number} answers: {setup.workers} x {setup.threads}"
            f" threads, batches of up to {setup.batch}, {setup.samples_per_second:,.0f} samples/s"
            f"{'; lone requests in all cores' if servable.alone else ''}"
        )
        self._make_room(entry)
        self._retire(model)

    def _open(self, entry: Entry) -> Servable:
        opener = load_run if entry.place.is_run else load
        with explained(str(entry.place.path)):
            return opener(entry.place.path, self.options.device, self.options.batch)

    def _retire(self, model: Model) -> None:
        """Unload what is served no longer, once something else of the model answers."""
        wanted = model.wanted
        ready = any(
            model.entries[number].state == "AVAILABLE"
            for number in wanted if number in model.entries
        )  # fmt: skip
        for number, entry in model.entries.items():
            if number not in wanted and entry.state == "AVAILABLE" and (ready or not wanted):
                self._begin_unload(entry)
        if not wanted and not model.entries:
            self.models.pop(model.name, None)

    def _make_room(self, newest: Entry) -> None:
        limit = self.options.memory
        loaded = sorted(
            (e for e in self._entries if e.state == "AVAILABLE"), key=lambda each: each.last_used
        )
        total = sum(each.size for each in loaded)
        for each in loaded:
            if limit is None or total <= limit:
                return
            if each is not newest:
                total -= each.size
                each.evicted = True
                self._begin_unload(each)

    def _begin_unload(self, entry: Entry) -> asyncio.Task[None]:
        entry.state = "UNLOADING"
        return self._spawn(self._unload(entry))

    async def _unload(self, entry: Entry) -> None:
        while entry.in_flight:
            entry.released.clear()
            await entry.released.wait()
        batcher, entry.batcher = entry.batcher, None
        if batcher is not None:
            await batcher.drain()
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._loading, batcher.servable.close)
            del batcher  # the last reference: only then is there anything to give back
            await loop.run_in_executor(self._loading, give_back_memory)
        entry.state = "END"
        self.say(f"{entry.name} version {entry.number} is unloaded")

    def find(self, name: str, number: int | None = None, label: str | None = None) -> Entry:
        """Which version answers; NotServedError where none does."""
        model = self.models.get(name)
        if model is None:
            known = ", ".join(sorted(self.models)) or "none"
            raise NotServedError(
                f"there is no model {name!r}: served are {known}", known=not self.looked
            )
        if label is not None:
            if label not in model.serving.labels:
                raise NotServedError(f"{name} has no label {label!r}")
            number = model.serving.labels[label]
        if number is None:
            number = self._default(model)
        entry = model.entries.get(number)
        if entry is None or not (entry.state == "AVAILABLE" or entry.evicted):
            state = f"{entry.state}: {entry.error}" if entry and entry.error else ""
            state = state or (entry.state if entry else "not there")
            raise NotServedError(
                f"{name} version {number} is not served ({state})",
                known=entry is not None and not entry.error,
            )
        return entry

    def _default(self, model: Model) -> int:
        there = model.available()
        labels = model.serving.labels
        stable, canary = labels.get("stable"), labels.get("canary")
        percent = model.serving.canary_percent
        if canary in there and canary is not None and self.dice.random() * 100 < percent:
            return canary
        if stable in there and stable is not None:
            return stable
        # A canary answers its percentage alone, unless there is nobody else.
        others = [number for number in there if number != canary or percent == 0] or there
        if not others:
            raise NotServedError(f"no version of {model.name} answers yet", known=True)
        return others[-1]

    @contextlib.asynccontextmanager
    async def using(self, entry: Entry) -> AsyncIterator[Batcher]:
        """The batcher of a version, which stays loaded until the request is answered."""
        if entry.batcher is None and entry.evicted:
            await self._reload(entry)
        else:
            self.enter(entry)
        try:
            if entry.batcher is None:
                raise NotServedError(
                    f"{entry.name} version {entry.number} is not served ({entry.state})", known=True
                )
            yield entry.batcher
        finally:
            self.leave(entry)

    def enter(self, entry: Entry) -> None:
        """A version that is loaded has one more request to answer, and stays until then."""
        entry.in_flight += 1
        entry.last_used = time.monotonic()

    def leave(self, entry: Entry) -> None:
        entry.in_flight -= 1
        if not entry.in_flight:
            entry.released.set()

    async def _reload(self, entry: Entry) -> None:
        """Load what was evicted, and enter it: others that come back must not take it first."""
        while entry.state == "UNLOADING":
            await asyncio.sleep(0.01)
        self.enter(entry)
        try:
            if entry.state == "END":
                self._load(self.models[entry.name], entry)
            if entry.task is not None:
                await asyncio.wait([entry.task])
        except BaseException:
            self.leave(entry)
            raise

    @property
    def is_ready(self) -> bool:
        """Every model that is there has a version that answers."""
        return self.looked and all(model.available() for model in self.models.values())

    async def close(self) -> None:
        """Unload everything, after the last request."""
        entries = self._entries
        while self._tasks:
            await asyncio.wait(list(self._tasks))
        for entry in entries:
            if entry.state == "AVAILABLE":
                await self._begin_unload(entry)
        self._loading.shutdown(wait=True)
