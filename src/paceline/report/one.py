"""Sections of the report of one run that come from its plan, race and metrics."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from paceline.report.load import RunData
from paceline.schema import Candidate, Config, NodePlan, Race, encode
from paceline.schema.strategies import describe
from paceline.text import rate


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested tables.

    >>> dict(flat({"train": {"epochs": 5}, "seed": 0}))
    {'train.epochs': 5, 'seed': 0}
    """
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _empty(run: RunData, key: str, title: str, why: str) -> Section | None:
    """A section that only says why it is empty; none while what it shows may still come."""
    return None if run.under_way else Section(key=key, title=title, text=(why,))


def asked_section(run: RunData) -> Section | None:
    """What differs from the defaults, and everything for those who want it."""
    settings = dict(flat(run.config))
    if not settings:
        return _empty(run, "asked", "What was asked", "The run has no readable config.toml.")
    defaults = _defaults()
    versions = {k: v for k, v in settings.items() if k.startswith("versions.")}
    changed = {
        key: value
        for key, value in settings.items()
        if key not in versions and value not in (defaults.get(key), [])
    }
    rest = {k: v for k, v in settings.items() if k not in changed and k not in versions}
    with_versions = ", ".join(
        f"{key.removeprefix('versions.')} {value}" for key, value in versions.items()
    )
    text = [
        f"{run.model} on {run.data}, {_batch(run)},"
        f" {run.asked('train.epochs')} epochs with {run.asked('optimizer.name')}."
    ]
    if with_versions:
        text.append(f"Made with {with_versions}.")
    return Section(
        key="asked",
        title="What was asked",
        text=tuple(text),
        blocks=(
            _settings_table("settings", "Settings that are not the default", changed),
            _settings_table("defaults", "Settings left at their default", rest, folded=True),
        ),
    )


@functools.cache
def _defaults() -> dict[str, Any]:
    """A live page asks for them every second."""
    return dict(flat(encode(Config())))


def _batch(run: RunData) -> str:
    per_worker = run.asked("workload.batch_per_worker")
    whole = f"batches of {run.batch}" if run.batch else "an unknown batch"
    return f"{whole} ({per_worker} per worker)" if per_worker else whole


def _settings_table(
    key: str, title: str, settings: Mapping[str, Any], folded: bool = False
) -> Table:
    rows = tuple((name, _plain(value)) for name, value in settings.items())
    return Table(key=key, title=title, columns=("setting", "value"), rows=rows, folded=folded)


def _plain(value: Any) -> Cell:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "[]"
    return value if isinstance(value, str | int | float) else str(value)


def race_section(run: RunData) -> Section | None:
    """Bars of the speedup over sequential, the fastest first; None after a training in legs."""
    race, title = run.race, "What was measured: the race"
    if race is not None and race.candidates:
        return _raced({"": race}, title, _said(race))
    if run.races:
        return _raced(run.races, title, _said_by(run.races))
    if race is None and (run.legs or run.under_way):
        return None
    strategy = run.asked("local.strategy")
    why = (
        f"No race was run: local.strategy = {strategy!r} was asked for."
        if strategy not in (None, "auto")
        else "The run has no race.json: no race was run, or its plan was given."
    )
    return Section(key="race", title=title, text=(why,))


def _said(race: Race) -> tuple[str, ...]:
    return (
        race.decision.removesuffix(".") + ".",
        f"{len(race.candidates)} candidates on {race.cores} cores in {race.seconds:.0f} s"
        f"{f', {race.made}' if race.made else ''}; other programs used"
        f" {race.busy:.0%} of the cores just before it.",
        *race.warnings,
    )


def _said_by(races: Mapping[str, Race]) -> tuple[str, ...]:
    decided = "; ".join(f"{host}: {race.decision}" for host, race in races.items())
    busy = [host for host, race in races.items() if race.busy > 0.2]
    doubt = (
        f"Other programs used {max(races[host].busy for host in busy):.0%} of the cores just"
        f" before the race of {', '.join(busy)}: these times are doubtful."
        if busy
        else ""
    )
    text = (f"Every host raced for its own fastest way: {decided}.", doubt)
    return tuple(filter(None, text))


def _raced(races: Mapping[str, Race], title: str, text: tuple[str, ...]) -> Section:
    """One race by what came of each candidate; those of several hosts, a series for each."""
    one = len(races) == 1 and "" in races
    all_of = [(host, c) for host, race in races.items() for c in race.candidates]
    ordered = sorted(all_of, key=lambda pair: -(pair[1].images_per_second or 0.0))
    ran = [(host, c) for host, c in ordered if c.speedup]
    kinds = ("chosen", "exact", "changes results") if one else tuple(races)
    looks = (1, 0, 2) if one else range(len(kinds))
    groups = {kind: [c for host, c in ran if kind == (_kind(c) if one else host)] for kind in kinds}
    best = sorted(ran, key=lambda pair: -(pair[1].speedup or 0.0))
    where = f"the same race on {races[''].cores} cores" if one else "the same host's race"
    figure = Figure(
        key="race",
        title="Speedup over sequential" + ("" if one else " on every host"),
        caption="Median of the timed steps of each trial, divided by that of one process with one"
        f" thread at fp32 in {where}; whiskers are the quartiles.",
        x=Axis(title="candidate", kind="category"),
        y=Axis(title="speedup over sequential", minimum=0.0),
        series=tuple(
            _bars(kind, look, groups[kind], one)
            for kind, look in zip(kinds, looks, strict=True)
            if groups[kind]
        ),
        horizontal=True,
        order=tuple(dict.fromkeys(c.name for _, c in best)),
    )
    by_host = ordered if one else sorted(ordered, key=lambda pair: list(races).index(pair[0]))
    rows = (
        (host, c.name, c.images_per_second, c.speedup, c.memory_mb or c.estimated_mb,
         "yes" if c.exact else "no", c.reason)
        for host, c in by_host
    )  # fmt: skip
    hidden = int(one)  # the column of hosts
    table = Table(
        key="race",
        title="Candidates" if one else "Candidates of every host",
        columns=("host", "candidate", "images/s", "speedup", "MB", "exact", "why")[hidden:],
        rows=tuple(row[hidden:] for row in rows),
        formats=("", "", ",.1f", ".2f", ",.0f", "", "")[hidden:],
        strong=next((i for i, (_, c) in enumerate(ordered) if one and c.chosen), None),
        folded=not one,
    )
    return Section(key="race", title=title, text=text, blocks=(figure, table) if ran else (table,))


def _kind(entry: Candidate) -> str:
    return "chosen" if entry.chosen else "exact" if entry.exact else "changes results"


def _bars(name: str, look: int, group: list[Candidate], one: bool) -> Series:
    return Series(
        name=name,
        shape="bar",
        look=look,
        x=tuple(c.name for c in group),
        y=tuple(c.speedup for c in group),
        low=tuple(_scaled(c, c.low) for c in group),
        high=tuple(_scaled(c, c.high) for c in group),
        labels=tuple(
            f"{rate(c.images_per_second or 0)} images/s"
            + (", chosen" if c.chosen and not one else "")
            for c in group
        ),
    )


def _scaled(entry: Candidate, speed: float | None) -> float | None:
    if speed is None or not entry.images_per_second or entry.speedup is None:
        return None
    return entry.speedup * speed / entry.images_per_second


def _work(node: NodePlan, shares: float) -> tuple[Cell, Cell]:
    """What a node does, and which part of every batch."""
    if node.role == "server":
        return "server", None
    return describe(node), node.share / shares


def plan_section(run: RunData) -> Section | None:
    """Who does what, why, and what was rejected."""
    plan = run.plan
    if plan is None:
        return _empty(run, "plan", "The plan", "The run has no readable plan.json.")
    shares = sum(node.share for node in plan.nodes) or 1.0
    nodes = Table(
        key="nodes",
        title="Nodes",
        columns=("host", "local strategy", "share of a batch", "ranks", "threads per rank"),
        rows=tuple(
            (node.host, *_work(node, shares), node.ranks, node.threads) for node in plan.nodes
        ),
        formats=("", "", ".1%", "d", "d"),
    )
    how = f"{plan.precision}, {plan.memory_format}{', compiled' if plan.compile else ''}"
    between = (
        f"Nodes agree by {plan.exchange}, partition {plan.partition}."
        if len(plan.nodes) > 1
        else "One node: nothing is exchanged between machines."
    )
    text = [f"Why: {plan.reason}."] if plan.reason else []
    text.append(f"{between} Numerics: {how}. Batch {plan.batch_size}.")
    blocks: list[Figure | Table] = [nodes]
    if plan.rejected:
        blocks.append(
            Table(
                key="rejected",
                title="What was not taken, and why",
                columns=("option", "images/s", "why"),
                rows=tuple((r.option, r.images_per_second, r.reason) for r in plan.rejected),
                formats=("", ",.1f", ""),
                folded=True,
            )
        )
    return Section(key="plan", title="The plan", text=tuple(text), blocks=tuple(blocks))


def curves_section(run: RunData) -> Section | None:
    """Loss, accuracy (with classes) and speed, epoch by epoch."""
    if not run.metrics:
        why = "No epoch has ended: metrics.jsonl is empty or missing."
        return _empty(run, "training", "How training went", why)
    figures = [
        _curve(run, "loss", "Loss", "loss", ("train_loss", "test_loss")),
        _curve(
            run, "accuracy", "Accuracy", "accuracy",
            ("train_accuracy", "test_accuracy", "test_top5"), percent=True,
        ),
        *(
            _curve(run, name, name, name, (f"train_{name}", f"test_{name}"))
            for name in _own_metrics(run)
        ),
        _curve(run, "speed", "Speed of training", "images/s", ("images_per_second",)),
    ]  # fmt: skip
    columns: tuple[tuple[str, str, str], ...] = (
        ("epoch", "epoch", "g"),
        ("train loss", "train_loss", ".4f"),
        ("train accuracy", "train_accuracy", ".2%"),
        ("test loss", "test_loss", ".4f"),
        ("test accuracy", "test_accuracy", ".2%"),
        *((f"test {name}", f"test_{name}", ".4g") for name in _own_metrics(run)),
        ("images/s", "images_per_second", ",.0f"),
        ("seconds", "seconds", ",.2f"),
        ("reading (s)", "read_seconds", ",.2f"),
        ("median update (s)", "update_seconds_median", ".4f"),
        ("MB sent", "bytes_sent", ",.1f"),
        ("exchange wait (s)", "exchange_wait_seconds", ",.2f"),
    )
    columns = tuple(
        column
        for column in columns
        if any(value is not None for value in run.column(column[1]))
        and (column[1] not in ("bytes_sent", "exchange_wait_seconds") or any(run.column(column[1])))
    )
    rows = zip(
        *(
            [v / 1e6 if key == "bytes_sent" and v is not None else v for v in run.column(key)]
            for _, key, _ in columns
        ),
        strict=True,
    )
    table = Table(
        key="epochs",
        title="Epochs",
        columns=tuple(title for title, _, _ in columns),
        rows=tuple(rows),
        formats=tuple(spec for _, _, spec in columns),
        folded=len(run.metrics) > MANY_EPOCHS,
    )
    return Section(
        key="training",
        title="How training went",
        blocks=(*(figure for figure in figures if figure), table),
    )


def _own_metrics(run: RunData) -> list[str]:
    """What the user's own metrics are called."""
    keys = {key for line in run.metrics for key in line}
    names = {key.partition("_")[2] for key in keys if key.startswith(("train_", "test_"))}
    return sorted(names - {"loss", "accuracy", "top5"})


MANY_EPOCHS = 20
"""From which on their table is shown when asked for."""
_NAMES = {
    "test_top5": "test, among the first five",
    "images_per_second": "images/s",
    "train": "training",
    "test": "test",
}


def _curve(
    run: RunData, key: str, title: str, unit: str, columns: tuple[str, ...], percent: bool = False
) -> Figure | None:
    epochs = tuple(e or 0.0 for e in run.column("epoch"))
    series = tuple(
        Series(
            name=_NAMES.get(column) or _NAMES[column.partition("_")[0]],
            look=place,
            x=epochs,
            y=run.column(column),
        )
        for place, column in enumerate(columns)
        if any(value is not None for value in run.column(column))
    )
    if not series:
        return None
    captions = {
        "loss": "Mean over the samples of an epoch (training, dropout on) and of the test set after"
        " it.",
        "accuracy": "Part of the samples that were classified correctly.",
        "speed": "Training samples divided by the time in the training loop; evaluation and"
        " checkpoints are left out.",
    }
    return Figure(
        key=key,
        title=title,
        caption=captions.get(key, "The mean over an epoch (training) and over the test set."),
        x=Axis(title="epoch", ticks=epochs if len(epochs) <= 12 else ()),
        y=Axis(
            title=unit,
            format="percent" if percent else "plain",
            minimum=0 if key in captions and not percent else None,
        ),
        series=series,
    )
