"""What a follower knows, in the form that the page, the terminal and the report share."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.observe.ledger import make_ledger
from paceline.report.load import RunData, load_run
from paceline.report.make import make_report
from paceline.report.page import parts
from paceline.report.track import HostSeen, Track
from paceline.schema.events import read_run
from paceline.watch.follow import Follower, RankSeen

MOST_EPOCHS = 150
"""Of a training under way that are drawn."""


def whole_run(path: Path) -> RunData:
    """Everything that is known of a run: what its report is made of."""
    run = load_run(path, events=False)
    past = read_run(run.path)
    if not past:
        return run
    follower = Follower(run.path)
    follower.catch_up()
    follower.ledger = make_ledger(past)
    sessions = tuple(each[-1] for each in past.values())
    return replace(run, sessions=sessions, ledger=follower.ledger, track=track_of(follower))


def run_of(run: Follower) -> RunData:
    """A run as it is now; once it is over, all that is known of it, as its report has it."""
    if run.is_over:
        with contextlib.suppress(PacelineError, OSError, ValueError):
            return run.remembered(whole_run)
    return RunData(
        path=run.run.path,
        name=run.run.path.name,
        config=run.config,
        plan=run.plan,
        legs=tuple(run.legs),
        metrics=_fewer(run.metrics),
        summary=run.summary,
        ledger=run.ledger,
        track=track_of(run),
    )


def _fewer(metrics: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Some epochs of a long training, its newest among them: all would be sent after each."""
    every = -(-len(metrics) // MOST_EPOCHS) or 1
    return tuple(metrics[(len(metrics) - 1) % every :: every])


def state_of(run: Follower) -> dict[str, str]:
    """What the page shows, by parts as JSON; those that did not change need not be sent again."""
    report = make_report([run_of(run)])
    return parts(replace(report, controls=_controls(run)) if run.takes else report)


def _controls(run: Follower) -> dict[str, object]:
    train = run.config.get("train", {})
    return {
        "takes": run.takes,
        "epochs": train.get("epochs", 5),
        "accuracy": train.get("until", {}).get("accuracy"),
        "checkpoint": run.checkpoint,
    }


def track_of(run: Follower) -> Track:
    last = run.progress[-1] if run.progress else None
    began, speed, training = run.began, speed_now(run), run.state in ("training", "starting")
    epochs = run.config.get("train", {}).get("epochs", 5)
    left = max(0, last.updates - last.update) * run.batch / speed if last and speed else None
    return Track(
        state=run.state,
        seconds=max(0.0, (run.looked if run.state == "training" else run.newest) - began),
        update=last.update if last else 0,
        updates=last.updates if last else 0,
        epoch=last.epoch if last else 0,
        epochs=epochs if isinstance(epochs, int) else None,
        loss=last.loss if last else None,
        speed=speed,
        left=left if run.state == "training" else None,
        losses=[(at - began, value) for at, value in run.loss.points],
        speeds=[(at - began, value) for at, value in run.speed.points],
        hosts=tuple(_hosts(run)),
        leg=(max(0.0, run.leg.time - began), run.leg.text) if run.leg and training else None,
        notes=tuple((at - began, rank, note.what, note.text) for at, rank, note in run.notes),
        unit=str(run.config.get("workload", {}).get("unit", "images")),
    )


def speed_now(run: Follower) -> float | None:
    """Samples per second over the last word of progress; None before there is any."""
    if len(run.progress) < 2:
        return None
    first, last = run.progress[max(-11, -len(run.progress))], run.progress[-1]
    seconds = last.time - first.time
    return (last.update - first.update) * run.batch / seconds if seconds > 0 else None


def _hosts(run: Follower) -> list[HostSeen]:
    """One for each host, its ranks together."""
    found: dict[str, list[tuple[int, RankSeen]]] = {}
    for number, seen in run.current.items():
        if seen.start is not None:
            found.setdefault(seen.start.host, []).append((number, seen))
    hosts = [_host(run, name, ranks) for name, ranks in found.items()]
    return hosts + [
        HostSeen(name=name, state="gone", began=max(0.0, first - run.began), until=last - run.began)
        for name, (first, last) in run.left.items()
    ]


def _host(run: Follower, name: str, ranks: list[tuple[int, RankSeen]]) -> HostSeen:
    booked = {rank.rank: rank for rank in run.ledger.ranks}
    states = [run.state_of(number) for number, _ in ranks]
    there = [s for (_, s), state in zip(ranks, states, strict=True) if state == "there"]
    samples = [seen.sample for seen in there if seen.sample is not None]
    workers = [booked[n] for n, _ in ranks if n in booked and booked[n].role == "worker"]
    waits = [rank.shares["waiting"] + rank.shares["communication"] for rank in workers]
    curve = next((seen.cpu.points[-90:] for _, seen in ranks if seen.cpu.points), [])
    return HostSeen(
        name=name,
        state=max(states, key=("ended", "gone", "there").index),
        began=max(0.0, min(seen.start.began for _, seen in ranks if seen.start) - run.began),
        until=max(seen.heard for _, seen in ranks) - run.began,
        cpu=sum(sample.cpu for sample in samples) if samples else None,
        busy=samples[-1].busy if samples else None,
        memory=sum(sample.resident for sample in samples) / 1e6 if samples else None,
        sent=there[-1].sent if samples else None,
        received=there[-1].received if samples else None,
        waited=statistics.fmean(waits) if waits else None,
        made_wait=max((run.ledger.made_wait(rank.rank) for rank in workers), default=None),
        curve=[(at - run.began, cpu) for at, cpu in curve],
    )
