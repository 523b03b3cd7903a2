"""What the steps say about the study's claims: tables and figures of them, and a verdict each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report.figure import Figure, Section, Table
from studies.outcome import Claim, Findings, Outcomes, Verdict
from studies.shi import figures, tables
from studies.shi.lost import Course, follow
from studies.shi.measures import Measured, measure
from studies.shi.study import Study

TOLERANCE = 0.02
"""How far a count may be from what the study's formula says."""
NEAR_LINEAR = 0.8
"""Part of the gain that more workers promise from which a speedup is called near linear."""
LEVELS_OFF = 0.5
"""Part of it below which a speedup levels off."""
QUOTA_MET = 0.95
"""Part of its quota that a worker which only computes gets on a quiet machine."""
UNTESTED: Verdict = "cannot be tested here"


def findings(outcomes: Outcomes) -> Findings:
    """The page of the experiment, from whatever steps are done."""
    study = Study(
        published=outcomes.published,
        measured=tuple(measure(each) for each in outcomes.all if "about" not in each.step.facts),
    )
    courses = [follow(each) for each in outcomes.where(about="lost")]
    speed: list[Figure | Table] = [*figures.speeds(study), tables.speeds(study)]
    return Findings(
        sections=(
            Section(
                key="traffic",
                title="Traffic of a node per update",
                text=(tables.TRAFFIC_TEXT,),
                blocks=(*figures.traffic(study), tables.traffic(study)),
            ),
            Section(key="speed", title="Speed", text=(tables.SPEED_TEXT,), blocks=tuple(speed)),
            Section(
                key="lost",
                title="Workers that die",
                text=(tables.LOST_TEXT,),
                blocks=(*figures.lost(courses), *tables.lost(courses)),
            ),
            Section(key="models", title="Networks", blocks=(tables.models(study),)),
        ),
        claims=(
            _server_levels_off(study),
            _server_traffic(study),
            _ring_near_linear(study),
            _ring_flat(study),
            _goes_on(courses),
            _ring_ends(courses),
            Claim(
                claim="Images per second on up to six K80 cards, and top-1 and top-5 accuracy.",
                verdict=UNTESTED,
                because="There is no card here, and accuracies take full trainings on ImageNet;"
                " each step here is three updates on the processor.",
            ),
        ),
        notes=_notes(outcomes, study),
    )


def _server_levels_off(study: Study) -> Claim:
    claim = "With a parameter server the speed levels off as workers are added."
    gains = _gains(study, "server")
    if not gains:
        return Claim(claim=claim, verdict=UNTESTED, because="Its steps have not been run.")
    return _judged(
        claim,
        all(each.part < LEVELS_OFF for each in gains),
        f"{_listed(study, gains)}. It levels off where less than {LEVELS_OFF:.0%} of the promised"
        " gain comes.",
    )


@dataclass(frozen=True, kw_only=True)
class _Gain:
    """What more workers brought."""

    few: Measured
    many: Measured
    part: float
    """Of what they promise: 1 is as many times the speed as there are times the workers."""
    speedup: float | None


def _gains(study: Study, kind: str) -> list[_Gain]:
    """From the fewest workers that exchange anything to the most, for every network."""
    found = []
    for model in study.models:
        steps = [each for each in study.of(kind, model) if each.speed and each.workers > 1]
        if len(steps) > 1 and steps[0].speed and steps[-1].speed:
            few, many = steps[0], steps[-1]
            part = (steps[-1].speed / steps[0].speed - 1) / (many.workers / few.workers - 1)
            found.append(_Gain(few=few, many=many, part=part, speedup=study.speedup(many)))
    return found


def _listed(study: Study, gains: Sequence[_Gain]) -> str:
    words = []
    for each in gains:
        alone = f", {each.speedup:.2f} times one worker alone" if each.speedup else ""
        words.append(
            f"{study.title(each.few.model)} from {each.few.workers} to {each.many.workers} workers:"
            f" {each.few.speed:.1f} to {each.many.speed:.1f} images/s, {each.part:.0%} of the gain"
            f" that they promise{alone}"
        )
    return "; ".join(words)


def _server_traffic(study: Study) -> Claim:
    claim = "The server's traffic grows with the workers."
    found = [
        (each, each.server.bytes_received / each.gradient / each.workers)
        for each in study.of("server")
        if each.server is not None and each.gradient
    ]
    if not found:
        return Claim(claim=claim, verdict=UNTESTED, because="Its steps have not been run.")
    holds = all(abs(ratio - 1) <= TOLERANCE for _, ratio in found)
    low, high = min(ratio for _, ratio in found), max(ratio for _, ratio in found)
    counts = ", ".join(str(each) for each in sorted({each.workers for each, _ in found}))
    return _judged(
        claim,
        holds,
        f"At {counts} workers it receives {low:.3f} to {high:.3f} gradients per worker and update"
        f" by the kernel's counters, headers included ({len(found)} steps): proportional to the"
        " workers.",
    )


def _ring_near_linear(study: Study) -> Claim:
    claim = "With ring all-reduce the speed stays near linear."
    gains = _gains(study, "ring")
    if not gains:
        return Claim(claim=claim, verdict=UNTESTED, because="Its steps have not been run.")
    return _judged(
        claim,
        all(each.part >= NEAR_LINEAR for each in gains),
        f"{_listed(study, gains)}. Near linear: {NEAR_LINEAR:.0%} or more of the promised gain for"
        " every network. The step from one worker to two pays for the exchange itself, which here"
        " takes its processor time from the same core.",
    )


def _ring_flat(study: Study) -> Claim:
    claim = "The ring's traffic per node stays flat: 2 (N-1)/N of the gradient."
    found = [
        (each, each.worker.bytes_sent / each.gradient / ring_part(each.workers) - 1)
        for each in study.of("ring")
        if each.worker is not None and each.gradient
    ]
    if not found:
        return Claim(claim=claim, verdict=UNTESTED, because="Its steps have not been run.")
    worst = max(found, key=lambda pair: abs(pair[1]))
    counts = ", ".join(str(each) for each in sorted({each.workers for each, _ in found}))
    return _judged(
        claim,
        abs(worst[1]) <= TOLERANCE,
        f"Bytes sent by the kernel's counters at {counts} workers, {len(found)} steps: at most"
        f" {abs(worst[1]):.2%} from the formula ({study.title(worst[0].model)} on"
        f" {worst[0].workers}), headers and acknowledgements included.",
    )


def _goes_on(courses: list[Course]) -> Claim:
    claim = "Asked by the study: does training with a parameter server go on when workers die?"
    served = [each for each in courses if each.kind != "ring" and (each.losses or each.updates)]
    if not served:
        return Claim(claim=claim, verdict=UNTESTED, because="Its steps have not been run.")
    holds = all(each.finished and each.losses for each in served)
    words = []
    for each in served:
        who = " and ".join(f"{loss.host} at update {loss.update}" for loss in each.losses)
        ended = f"all {each.updates} updates done" if each.finished else "it did not end in order"
        words.append(f"{each.kind}: lost {who or 'nobody'}, {ended}")
    return _judged(claim, holds, "; ".join(words) + ".")


def _ring_ends(courses: list[Course]) -> Claim:
    claim = "For comparison: a ring ends when a worker dies."
    ring = next((each for each in courses if each.kind == "ring"), None)
    if ring is None or not ring.updates:
        return Claim(claim=claim, verdict=UNTESTED, because="Its step has not been run.")
    return _judged(claim, not ring.finished, f"After {ring.updates} updates it said: {ring.said}")


def _judged(claim: str, holds: bool, because: str) -> Claim:
    return Claim(claim=claim, verdict="holds" if holds else "does not hold", because=because)


def ring_part(workers: int) -> float:
    """Part of the gradient that a node of a ring sends per update.

    >>> ring_part(2), ring_part(4)
    (1.0, 1.5)
    """
    return 2 * (workers - 1) / workers


def _notes(outcomes: Outcomes, study: Study) -> tuple[str, ...]:
    names = {str(each.step.settings.get("workload.data")) for each in outcomes.all}
    real = names == {"cifar10"}
    return (
        "Data: CIFAR-10 itself, 32x32."
        if real
        else "Data: made pictures of 32x32 in 10 classes, because CIFAR-10 is not in PACELINE_DATA"
        " (`paceline data get cifar10`). Speeds and traffic do not depend on what is in a picture;"
        " losses do.",
        "Every worker and the server is an emulated host with 0.28 of a core and a link of"
        " 1 Gbit/s, so that six workers and a server fit on two cores and none takes time from"
        " another. The study had one K80 card per worker: compare shapes, not images per second.",
        "Batch 32 per worker, SGD at 0.0001, three updates in each step; speeds leave the first"
        " one out. DDP is stock DistributedDataParallel over Gloo, two epochs of two updates of"
        " which the second counts.",
        "The networks are those of the study built for 32x32 and 10 classes (see the last table):"
        " smaller than the study's list says, which is for 224x224 and 1000 classes.",
        *_agreement(study),
        *_busy(study),
    )


def _busy(study: Study) -> tuple[str, ...]:
    """Whether this machine gave the hosts what was promised to them."""
    got = [each.cpu for each in study.of("alone") if each.cpu is not None]
    if not got or min(got) >= QUOTA_MET:
        return ()
    return (
        f"One worker alone got only {min(got):.0%} of its quota: something else was using this"
        " machine's cores. Traffic is not touched by that; speeds are lower, and compare less well,"
        " than on a quiet machine.",
    )


def _agreement(study: Study) -> tuple[str, ...]:
    """The server's counters come from its workers' side: how far both sides agree."""
    ratios = [each.agreement for each in study.measured if each.agreement]
    if not ratios:
        return ()
    worst = max(abs(ratio - 1) for ratio in ratios)
    return (
        "A server takes no samples of its own; its traffic per update is what its workers' kernels"
        " sent and received, for they talk to nobody else. Over whole steps its own interface"
        f" counted the same to {worst:.3%}.",
    )
