"""What observing costs: blocks of updates with and without it, in turn, within one training.

    python -m benchmarks.observe [--pairs 60] [--seconds 1] [--batch-size 32]

mnist_cnn on the embedded digits, small updates, so that the cost per update shows. Blocks come
in pairs, in the order on-off, off-on, on-off..., a second apart: what else a machine does hits
both alike. Each pair gives a ratio of wall time and one of processor time (all threads, the one
that writes and samples included); the medians stand with 95% intervals. Starting and closing the
recorder happens once in a run, however long, and is timed apart.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import api
from paceline.config import load_config
from paceline.data.feed import Batch
from paceline.local.cores import usable_cores
from paceline.observe.recorder import FileRecorder, Recorder, make_recorder
from paceline.plan import asked_node, asked_plan
from paceline.schema import RankContext
from paceline.schema.events import read_run
from paceline.training.assemble import Task
from paceline.training.loop import Trainer
from paceline.training.parts import make_parts

BAR = 1.01
_RESAMPLES = 4000


class Switch(Recorder):
    """Listens while it has someone to hand on to."""

    def __init__(self) -> None:
        self.to, self.calls = Recorder(), 0

    def span(self, *words: Any, **options: Any) -> Any:
        self.calls += 1
        return self.to.span(*words, **options)

    def add(self, *words: Any, **options: Any) -> None:
        self.calls += 1
        self.to.update = self.update
        self.to.add(*words, **options)


@dataclass(frozen=True)
class Block:
    """Seconds per update, and of what comes once: starting and closing the recorder."""

    wall: float
    cpu: float
    once: float


@dataclass(frozen=True)
class Verdict:
    """A ratio of with to without, and between which two it lies with 95%."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4f} (95%: {self.low:.4f} to {self.high:.4f})"


def verdict(ratios: Sequence[float]) -> Verdict:
    """The median of paired ratios with a bootstrap interval.

    >>> verdict([1.0, 1.0, 1.0])
    Verdict(median=1.0, low=1.0, high=1.0)
    """
    choose = random.Random(0)
    medians = sorted(
        statistics.median(choose.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)
    )
    low, high = medians[_RESAMPLES // 40], medians[-_RESAMPLES // 40]
    return Verdict(statistics.median(ratios), low, high)


def call_seconds(recorder: Recorder, calls: int = 20_000) -> float:
    """What recording one span takes the thread that trains."""
    began = time.thread_time()
    for _ in range(calls):
        with recorder.span("compute", update=0):
            pass
    return (time.thread_time() - began) / calls


class Bench:
    """One training whose blocks of updates are observed or not."""

    def __init__(self, folder: Path, model: str, batch_size: int) -> None:
        changes = (
            f"workload.model={model}",
            "workload.data=digits",
            f"workload.batch_size={batch_size}",
            "local.strategy=threads",
            "optimizer.schedule=constant",  # there are more updates than the epochs have
            f"local.threads={usable_cores()}",
        )
        config, self.run, _ = api.begin(load_config(None, changes), run=folder / "run")
        plan = asked_plan(config, asked_node(config.local, usable_cores()), "to be observed")
        task = Task(config=config, plan=plan, run=self.run)
        self.parts, self.recorder = make_parts(config, None), Switch()
        self.trainer = Trainer(task, self.parts, self.recorder, started=time.perf_counter())
        self.batches = self._batches()
        self.spans = 0

    def _batches(self) -> Iterator[Batch]:
        epoch = 0
        while True:
            yield from self.trainer.feed.epoch(epoch, 0)
            epoch += 1

    def block(self, updates: int, *, observed: bool) -> Block:
        """So many updates."""
        opened = time.perf_counter()
        if observed:
            self.recorder.to = make_recorder(self.run.rank(0), RankContext())
        wall, cpu = time.perf_counter(), time.process_time()
        once = wall - opened
        for _ in range(updates):
            self.trainer.run_update(next(self.batches))
        ended = time.perf_counter()
        wall, cpu = ended - wall, time.process_time() - cpu
        self.recorder.to.close()
        once += time.perf_counter() - ended
        self.recorder.to = Recorder()
        return Block(wall / updates, cpu / updates, once)

    def direct(self, updates: int) -> tuple[float, float]:
        """Processor time of writing and of calling, each over that of all updates."""
        recorder = make_recorder(self.run.rank(0), RankContext())
        assert isinstance(recorder, FileRecorder)
        self.recorder.to, self.recorder.calls = recorder, 0
        clock = time.pthread_getcpuclockid(recorder._thread.ident or 0)
        cpu = time.process_time()
        for _ in range(updates):
            self.trainer.run_update(next(self.batches))
        cpu, writing = time.process_time() - cpu, time.clock_gettime(clock)
        self.recorder.to = Recorder()
        calling = self.recorder.calls * call_seconds(recorder)
        recorder.close()
        return writing / cpu, calling / cpu

    def close(self) -> None:
        self.batches.close()  # type: ignore[attr-defined]
        self.trainer.strategy.close()
        self.parts.dataset.close()
        self.run.unlock()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each block, about")
    parser.add_argument("--model", default="mnist_cnn")
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.model, options.batch_size)
        try:
            return measure(bench, options.pairs, options.seconds)
        finally:
            bench.close()


def measure(bench: Bench, pairs: int, seconds: float) -> int:
    """All pairs, and what they come to; 1 where the bar is missed."""
    bench.block(20, observed=True)
    updates = max(10, round(seconds / bench.block(20, observed=False).wall))
    found: dict[bool, list[Block]] = {True: [], False: []}
    for number in range(pairs):
        for observed in (True, False) if number % 2 == 0 else (False, True):
            found[observed].append(bench.block(updates, observed=observed))
    sessions = read_run(bench.run.path)[0]
    assert len(sessions) == pairs + 1, "blocks that were to be observed were not"
    spans = statistics.median(len(session.spans) for session in sessions) / updates
    for name, blocks in (("without", found[False]), ("with", found[True])):
        wall = statistics.median(block.wall for block in blocks)
        cpu = statistics.median(block.cpu for block in blocks)
        print(f"{name:8} {wall * 1e3:7.2f} ms per update, {cpu * 1e3:7.2f} ms of processor time")
    ratios = {
        kind: verdict(
            [
                getattr(on, kind) / getattr(off, kind)
                for on, off in zip(found[True], found[False], strict=True)
            ]
        )
        for kind in ("wall", "cpu")
    }
    print(f"with / without, wall time:      {ratios['wall']}")
    print(f"with / without, processor time: {ratios['cpu']}")
    writing, calling = bench.direct(10 * updates)
    direct = writing + calling
    print(
        f"recording over all processor time, counted directly: {direct:.3%}"
        f" (the thread that writes and samples {writing:.3%}, calls {calling:.3%})"
    )
    once = statistics.median(block.once for block in found[True])
    print(f"starting and closing the recorder, once in a run: {once * 1e3:.1f} ms")
    print(f"{pairs} pairs of blocks of {updates} updates, {spans:.1f} spans per update")
    lost = direct > BAR - 1 or min(each.low for each in ratios.values()) > BAR
    kept = max(each.high for each in ratios.values()) <= BAR
    noise = "met by the direct count; the ratios are within the noise"
    print(f"bar: at most {BAR}: {'missed' if lost else 'met' if kept else noise}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
