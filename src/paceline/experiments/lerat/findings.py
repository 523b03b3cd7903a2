"""Tables, figures and verdicts of the study of local parallelism before MPI."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline.experiments.lerat.resources import network_figure, peak_rate, resources_section
from paceline.experiments.lerat.speeds import (
    GPU_SETUPS,
    SETUPS,
    WORKS,
    batch_of,
    bytes_per_update,
    find,
    images_per_second,
    measured_updates,
    speedup,
    why_not,
)
from paceline.experiments.outcome import Claim, Findings, Outcomes, Verdict
from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from paceline.report.load import strategy_name

MODELS = {"complex_small": "VGG16", "simple_big": "AlexNet"}
BAR = 1.3
"""Two hosts with Paceline against stock DDP on the same hosts, AlexNet."""
EXACT = 1e-4
"""Largest relative difference of losses that summation order explains."""


def findings(outcomes: Outcomes) -> Findings:
    """Everything that the page shows."""
    sections: list[Section | None] = []
    sections += [_speedup_section(outcomes), _hosts_section(outcomes), _times_section(outcomes)]
    for work in reversed(WORKS):
        sections.append(resources_section(outcomes, work, MODELS[work]))
    return Findings(
        sections=tuple(section for section in sections if section is not None),
        claims=_claims(outcomes),
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
    )


def _speedup_section(outcomes: Outcomes) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for setup in SETUPS:
        cells: list[Cell] = [setup.title]
        for work in WORKS:
            cells.append(_published(outcomes, work, setup.key, setup.published))
            value = speedup(outcomes, work, setup.key)
            cells.append(value if value else why_not(find(outcomes, work, setup.key)))
        rows.append(tuple(cells))
    for key, title in GPU_SETUPS:
        cells = [title]
        for work in WORKS:
            cells += [outcomes.published[work]["gpu"][key], "needs GPUs"]
        rows.append(tuple(cells))
    names = [f"{MODELS[work]}: {who}" for work in WORKS for who in ("study", "here")]
    table = Table(
        key="speedups",
        title="Speedup over one core (GPU rows: over one GPU)",
        columns=("set-up", *names),
        rows=tuple(rows),
        formats=("", ".2f", ".2f", ".2f", ".2f"),
    )
    blocks = [_speedup_figure(outcomes), _efficiency_figure(outcomes), table]
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
        for setup in SETUPS:
            outcome = find(outcomes, work, setup.key)
            if setup.place != "hosts" or outcome is None:
                continue
            speed, sent = images_per_second(outcome), bytes_per_update(outcome)
            how = outcome.run.strategy if outcome.run is not None and outcome.done else None
            if outcome.run is not None and outcome.run.plan is not None and outcome.done:
                how = f"{strategy_name(outcome.run.plan.nodes[0])}; {outcome.run.exchange}"
            rows.append(
                (
                    MODELS[work],
                    setup.title.removeprefix("two hosts: "),
                    how or why_not(outcome),
                    speed,
                    speed / stock if speed and stock else None,
                    sent / 1e6 if sent else None,
                    outcome.failed if outcome.failed.startswith("not installed") else None,
                )
            )
    table = Table(
        key="hosts",
        title="Two hosts that see 2 cores each and may use one",
        columns=("model", "what", "on each host; between them", "images/s", "of stock DDP",
                 "MB sent per host and update", "to install"),
        rows=tuple(rows),
        formats=("", "", "", ",.1f", ".2f", ",.2f", ""),
    )  # fmt: skip
    figures = [network_figure(outcomes, work, MODELS[work]) for work in reversed(WORKS)]
    return Section(
        key="hosts",
        title="Two hosts",
        text=(
            "Stock DDP runs one process per core that it sees, under torchrun over Gloo; Paceline"
            " races each host's own strategies, runs one MPI task per host and splits large linear"
            " layers over hosts where that sends fewer bytes (docs/partition.md).",
        ),
        blocks=(table, *(figure for figure in figures if figure is not None)),
    )


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


# Verdicts

Judgement = tuple[bool, str] | None


def _claims(outcomes: Outcomes) -> tuple[Claim, ...]:
    return (
        _each("Several processes are faster than one process with a replica per thread"
              " (5.76 against 4, and 15.57 against 6.15).", outcomes, _processes_win),
        _each("On a CPU, model parallelism is pure overhead.", outcomes, _model_loses),
        _each("Joining two machines by MPI, each with its own best local set-up, is faster than"
              " one machine.", outcomes, _hosts_win),
        _each("Averaging inside each machine first and then over MPI beats one rank per core"
              " everywhere (its comparison: Horovod).", outcomes, _local_first_wins),
        _peer("MPI with a local set-up is 6.8 (VGG16) and 4.6 (AlexNet) times as fast as Horovod on"
              " CPUs.", outcomes, "horovod"),
        _peer("Spark is hardly faster than one core (1.14), or slower (0.53).", outcomes, "spark"),
        _traffic(outcomes),
        _bar(outcomes),
        Claim(
            claim="On GPUs, pipelined model parallelism is the best local set-up (6.74 and 8.01).",
            verdict="cannot be tested here",
            because="It needs two GPUs; Paceline's CUDA paths have never been run.",
        ),
    )  # fmt: skip


def _each(claim: str, outcomes: Outcomes, judge: Callable[[Outcomes, str], Judgement]) -> Claim:
    """A claim about both workloads: it holds where it does for all that were measured."""
    found = [(MODELS[work], judge(outcomes, work)) for work in WORKS]
    known = [(model, judged) for model, judged in found if judged is not None]
    if not known:
        return Claim(claim=claim, verdict="cannot be tested here", because="Its steps are not run.")
    verdict: Verdict = "holds" if all(judged[0] for _, judged in known) else "does not hold"
    words = [f"{model}: {judged[1]}" for model, judged in known]
    return Claim(claim=claim, verdict=verdict, because="; ".join(words) + ".")


def _speeds(outcomes: Outcomes, work: str, setups: Sequence[str]) -> dict[str, float]:
    found = {setup: speedup(outcomes, work, setup) for setup in setups}
    return {setup: value for setup, value in found.items() if value}


def _processes_win(outcomes: Outcomes, work: str) -> Judgement:
    found = _speeds(outcomes, work, ("replicas", "processes"))
    if len(found) < 2:
        return None
    text = f"{found['processes']:.2f} against {found['replicas']:.2f} on 2 cores"
    return found["processes"] > found["replicas"], text


def _model_loses(outcomes: Outcomes, work: str) -> Judgement:
    data = _speeds(outcomes, work, ("threads", "replicas", "processes"))
    model = speedup(outcomes, work, "model")
    if not data or model is None:
        return None
    best = max(data, key=lambda setup: data[setup])
    text = f"speedup {model:.2f} with the study's cut, {data[best]:.2f} with {best} on 2 cores"
    return model < data[best], text


def _hosts_win(outcomes: Outcomes, work: str) -> Judgement:
    value = speedup(outcomes, work, "paceline")
    if value is None:
        return None
    return value > 1.0, f"two hosts of one core are {value:.2f} times as fast as one core"


def _local_first_wins(outcomes: Outcomes, work: str) -> Judgement:
    stock = images_per_second(find(outcomes, work, "ddp"))
    own = images_per_second(find(outcomes, work, "study"))
    if stock is None or own is None:
        return None
    text = f"{own / stock:.2f} times stock DDP with a rank per core, the same bytes of gradient"
    return own > stock, text


def _peer(claim: str, outcomes: Outcomes, peer: str) -> Claim:
    found = []
    for work in WORKS:
        own, other = (speedup(outcomes, work, setup) for setup in ("paceline", peer))
        if own and other:
            found.append((own / other, f"{MODELS[work]}: {own / other:.2f} times"))
    if not found:
        steps = [find(outcomes, work, peer) for work in WORKS]
        said = [each.failed for each in steps if each is not None and each.failed]
        because = f"{peer.capitalize()}: {said[0] if said else 'not run'}"
        return Claim(claim=claim, verdict="cannot be tested here", because=because)
    verdict: Verdict = "holds" if all(ratio > 1 for ratio, _ in found) else "does not hold"
    words = "; ".join(text for _, text in found)
    return Claim(claim=claim, verdict=verdict, because=f"Paceline against {peer}: {words}.")


def _traffic(outcomes: Outcomes) -> Claim:
    claim = "The network carries at most 35 KiB/s under MPI (its figure; a doubt)."
    peaks = {work: peak_rate(outcomes, work) for work in WORKS}
    known = {MODELS[work]: peak for work, peak in peaks.items() if peak}
    if not known:
        return Claim(claim=claim, verdict="cannot be tested here", because="Its steps are not run.")
    words = ", ".join(f"{model} {peak:,.0f} MB/s" for model, peak in known.items())
    low = all(peak * 1e6 <= 35 * 1024 for peak in known.values())
    return Claim(
        claim=claim,
        verdict="holds" if low else "does not hold",
        because=f"Peaks sent by a host with gradients or activations of every update: {words}.",
    )


def same_result(outcomes: Outcomes) -> Judgement:
    """Whether two hosts ended with the losses of one machine."""
    one, two = (outcomes.one(place="exact", setup=setup) for setup in ("one", "two"))
    if one is None or two is None or not one.done or not two.done:
        return None
    words, same = [], True
    for key in ("train_loss", "test_loss"):
        first, second = one.number(key), two.number(key)
        if first is None or second is None:
            return None
        same = same and math.isclose(first, second, rel_tol=EXACT)
        words.append(f"{key.replace('_', ' ')} {first:.6f} and {second:.6f}")
    text = f"one machine and two hosts from the same weights, without dropout: {', '.join(words)}"
    return same, f"{text} (untrained: {math.log(3):.4f})"


def _bar(outcomes: Outcomes) -> Claim:
    claim = (
        f"Paceline's own: two hosts train AlexNet at least {BAR} times as fast as stock DDP with a"
        " process per core on the same hosts, with the result of one machine."
    )
    stock = images_per_second(find(outcomes, "simple_big", "ddp"))
    own = images_per_second(find(outcomes, "simple_big", "paceline"))
    exact = same_result(outcomes)
    if stock is None or own is None or exact is None:
        return Claim(claim=claim, verdict="cannot be tested here", because="Its steps are not run.")
    good = own >= BAR * stock and exact[0]
    speed = f"{own:.1f} against {stock:.1f} images/s, {own / stock:.2f} times"
    return Claim(
        claim=claim,
        verdict="holds" if good else "does not hold",
        because=f"{speed}; {exact[1]}.",
    )
