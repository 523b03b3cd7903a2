"""Tables, figures and verdicts of the study of local parallelism before MPI."""

from __future__ import annotations

from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from paceline.schema.strategies import describe
from studies.lerat.resources import core_time, network_figure, resources_section
from studies.lerat.speeds import (
    GPU_SETUPS,
    MODELS,
    SETUPS,
    WORKS,
    batch_of,
    bytes_per_update,
    find,
    images_per_second,
    measured_updates,
    ranks_of,
    speedup,
    why_not,
)
from studies.lerat.verdicts import claims
from studies.outcome import Findings, Outcomes

QUIET = 0.9
"""Part of a core that one thread gets on a machine that does nothing else."""


def findings(outcomes: Outcomes) -> Findings:
    """Everything that the page shows."""
    sections: list[Section | None] = []
    sections += [_speedup_section(outcomes), _hosts_section(outcomes), _times_section(outcomes)]
    for work in reversed(WORKS):
        sections.append(resources_section(outcomes, work, MODELS[work]))
    return Findings(
        sections=tuple(section for section in sections if section is not None),
        claims=claims(outcomes),
        notes=_notes(outcomes),
    )


def _notes(outcomes: Outcomes) -> tuple[str, ...]:
    data = {str(each.step.settings.get("workload.data")) for each in outcomes.all}
    where = (
        "Photographs of fires in three classes, from the data folder."
        if data == {"fire"}
        else "The photographs were not found (PACELINE_DATA): made samples of the same size and"
        " number of classes stand in for them, so that times can be compared and losses not."
    )
    some = find(outcomes, "simple_big", "baseline")
    images = some.step.settings["data.limit"] if some else "some"
    return (
        where,
        "Speedup = images per second of a set-up / those of one core, on this machine. Every set-up"
        " makes a few updates on a few photographs"
        f" ({images} for AlexNet); the first epoch warms up and the others are measured. Seconds"
        " per epoch are scaled from there to the study's number of photographs.",
        "The study's machines had 16 cores each, and its speedups stand on these; this one has 2."
        " Compare efficiencies (speedup per core) rather than speedups.",
        "The batch is not given in the study: 32 for AlexNet and 8 for VGG16 here.",
        "Two hosts are emulated: each sees 2 cores and may use the time of one, joined by"
        " 1 Gbit/s (the study had 10). Both together may use 2 cores, as the local set-ups do.",
        "GPU columns of the study cannot be measured: no GPU is here.",
        *_doubts(outcomes),
    )


def _doubts(outcomes: Outcomes) -> list[str]:
    """Said where the machine was not ours alone."""
    found = {MODELS[work]: core_time(outcomes, work) for work in WORKS}
    low = [f"{part:.2f} of a core for {model}" for model, part in found.items()
           if part is not None and part < QUIET]  # fmt: skip
    if not low:
        return []
    return [
        "Doubtful times: other programs used this machine. The run on one core got"
        f" {', '.join(low)}"
        " while it made updates. Run it again (--again) on a quiet machine."
    ]


def _speedup_section(outcomes: Outcomes) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for setup in SETUPS:
        cells: list[Cell] = [setup.title]
        missing: dict[str, list[str]] = {}
        for work in WORKS:
            cells.append(_published(outcomes, work, setup.key, setup.published))
            cells.append(speedup(outcomes, work, setup.key))
            if why := why_not(find(outcomes, work, setup.key)):
                missing.setdefault(why, []).append(MODELS[work])
        words = [f"{why}: {', '.join(models)}" for why, models in missing.items()]
        rows.append((*cells, "; ".join(words) or None))
    names = [f"{MODELS[work]}: {who}" for work in WORKS for who in ("study", "here")]
    table = Table(
        key="speedups",
        title="Speedup over one core",
        columns=("set-up", *names, "what is missing"),
        rows=tuple(rows),
        formats=("", ".2f", ".2f", ".2f", ".2f", ""),
    )
    study = [outcomes.published[work]["gpu"] for work in WORKS]
    gpus = Table(
        key="gpu",
        title="The study's speedups over one GPU: no GPU is here",
        columns=("set-up", *(f"{MODELS[work]}: study" for work in WORKS)),
        rows=tuple((title, *(found[key] for found in study)) for key, title in GPU_SETUPS),
        formats=("", ".2f", ".2f"),
    )
    blocks = [_speedup_figure(outcomes), _efficiency_figure(outcomes), table, gpus]
    return Section(
        key="speedups",
        title="Speedups",
        text=("ComplexSmall is VGG16 on 791 photographs, SimpleBig AlexNet on 6,003.",),
        blocks=tuple(block for block in blocks if block is not None),
    )


def _published(outcomes: Outcomes, work: str, setup: str, key: str) -> Cell:
    if setup == "baseline":
        return 1.0
    return float(outcomes.published[work][key]) if key else None


def _speedup_figure(outcomes: Outcomes) -> Figure | None:
    series = []
    for place, work in enumerate(WORKS):
        points = [(s.title, v) for s in SETUPS if (v := speedup(outcomes, work, s.key))]
        if points:
            series.append(
                Series(
                    name=MODELS[work],
                    shape="bar",
                    look=place,
                    x=tuple(title for title, _ in points),
                    y=tuple(value for _, value in points),
                )
            )
    if not series:
        return None
    return Figure(
        key="speedups",
        title="Speedup over one core, here",
        caption="Images per second divided by those of one core. Two cores' time in every set-up"
        " but the first: 2 is ideal.",
        x=Axis(title="set-up", kind="category"),
        y=Axis(title="speedup", minimum=0.0),
        series=tuple(series),
        horizontal=True,
        order=tuple(
            s.title for s in SETUPS if any(speedup(outcomes, work, s.key) for work in WORKS)
        ),
    )


def _efficiency_figure(outcomes: Outcomes) -> Figure | None:
    """Study and here on one scale: speedup per core."""
    one, both = outcomes.published["cores"], outcomes.published["machines"]
    compared = [s for s in SETUPS if s.key in ("replicas", "processes", "paceline", "study")]
    series = []
    for place, work in enumerate(WORKS):
        study, here = [], []
        for setup in compared:
            cores = one * (both if setup.place == "hosts" else 1)
            study.append(outcomes.published[work][setup.published] / cores)
            value = speedup(outcomes, work, setup.key)
            here.append(value / setup.cores if value else None)
        names = tuple(setup.title for setup in compared)
        if any(here):
            for who, values, look in (("study", study, 2 * place), ("here", here, 2 * place + 1)):
                name = f"{MODELS[work]}, {who}"
                series.append(Series(name=name, shape="bar", look=look, x=names, y=tuple(values)))
    if not series:
        return None
    return Figure(
        key="efficiency",
        title="Speedup per core: the study's machines and this one",
        caption=f"Study: speedup / {one} cores, / {one * both} on two machines. Here: / 2 cores."
        " Its one number for MPI stands beside both two-host set-ups.",
        x=Axis(title="set-up", kind="category"),
        y=Axis(title="speedup per core", format="percent", minimum=0.0),
        series=tuple(series),
        horizontal=True,
    )


def _hosts_section(outcomes: Outcomes) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for work in reversed(WORKS):
        stock = images_per_second(find(outcomes, work, "ddp"))
        pairs = [
            (setup, outcome)
            for setup in SETUPS
            if setup.place == "hosts"
            for outcome in outcomes.where(work=work, setup=setup.key)
        ]
        for setup, outcome in pairs:
            speed, sent = images_per_second(outcome), bytes_per_update(outcome)
            how = ranks_of(outcome) if outcome.run is None and outcome.done else None
            if outcome.run is not None and outcome.done:
                how = outcome.run.strategy
                if outcome.run.plan is not None:
                    how = f"{describe(outcome.run.plan.nodes[0])}; {outcome.run.exchange}"
            rows.append(
                (
                    MODELS[work],
                    setup.title.removeprefix("two hosts: "),
                    how or why_not(outcome),
                    speed,
                    speed / stock if speed and stock else None,
                    sent / 1e6 if sent else None,
                )
            )
    table = Table(
        key="hosts",
        title="Two hosts that see 2 cores each and may use one",
        columns=("model", "what", "on each host; between them", "images/s", "of stock DDP",
                 "MB sent per host and update"),
        rows=tuple(rows),
        formats=("", "", "", ",.1f", ".2f", ",.2f"),
    )  # fmt: skip
    figures = [network_figure(outcomes, work, MODELS[work]) for work in reversed(WORKS)]
    return Section(
        key="hosts",
        title="Two hosts",
        text=(
            "Stock DDP, Horovod, Spark and Ray run with a process per core that they see, and with"
            " one that has all cores; where other tables have one row, it is the fastest. Paceline"
            " races each host's own strategies, runs one MPI task per host and splits large linear"
            " layers over hosts where that sends fewer bytes (docs/partition.md).",
            *_to_install(outcomes),
        ),
        blocks=(table, *(figure for figure in figures if figure is not None)),
    )


def _to_install(outcomes: Outcomes) -> list[str]:
    """How to get the peers that are not there."""
    lines = {
        setup.short: outcome.failed
        for setup in SETUPS
        for work in WORKS
        if (outcome := find(outcomes, work, setup.key)) is not None
        and outcome.failed.startswith("not installed")
    }
    return [f"{name} is {said}" for name, said in lines.items()]


def _times_section(outcomes: Outcomes) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for work in WORKS:
        photographs = int(outcomes.published[work]["photographs"])
        for setup in SETUPS:
            outcome = find(outcomes, work, setup.key)
            speed = images_per_second(outcome)
            if outcome is None or speed is None:
                continue
            baseline = setup.key == "baseline"
            rows.append(
                (
                    MODELS[work],
                    setup.title,
                    batch_of(outcome),
                    measured_updates(outcome),
                    batch_of(outcome) / speed,
                    speed,
                    photographs / speed,
                    outcomes.published[work]["baseline_seconds"] if baseline else None,
                )
            )
    table = Table(
        key="times",
        title="Times, scaled to an epoch of the study's number of photographs",
        columns=("model", "set-up", "batch", "updates measured", "s per update", "images/s",
                 "epoch s", "study s"),
        rows=tuple(rows),
        formats=("", "", "d", "d", ".3f", ",.2f", ",.0f", ",.2f"),
        folded=True,
    )  # fmt: skip
    text = "How many epochs the study's seconds stand for is not said there."
    return Section(key="times", title="Times", text=(text,), blocks=(table,))
