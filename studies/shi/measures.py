"""What one step of the experiment measured: speed, load and traffic of its training updates."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.report.load import finite
from paceline.schema.events import InterfaceTraffic, RankSession, Sample, Span
from studies.outcome import StepOutcome

INTERFACE = "eth0"
"""Of every lab host, to all others."""
MARGIN = 0.3
"""Seconds that may lie between a sample's time and the reading of its counters."""
SMALL = 100_000
"""Bytes that do not matter beside a gradient."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Traffic of one node in one update, mean over the updates."""

    bytes_sent: float
    bytes_received: float
    packets_sent: float | None = None
    packets_received: float | None = None

    @property
    def bytes(self) -> float:
        return self.bytes_sent + self.bytes_received


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One step in numbers; None where it has none."""

    model: str
    kind: str
    workers: int
    gradient: int | None = None
    """Bytes of one gradient: four for each parameter."""
    speed: float | None = None
    """Images per second of all workers, without the first update."""
    cpu: float | None = None
    """Part of their quota that the workers' processes used during the updates."""
    server_cpu: float | None = None
    """Part of its quota that the server's host used, start and end of the step included."""
    worker: Counts | None = None
    """A worker by the kernel's counters, mean over workers."""
    server: Counts | None = None
    """The server: what its workers' kernels sent is what it received."""
    counted: Counts | None = None
    """A worker by the exchange's own counters: what was to be moved, no headers."""
    agreement: float | None = None
    """Bytes of the server's own interface over those of all workers', whole step."""
    data: str = ""


def measure(outcome: StepOutcome) -> Measured:
    """Numbers of a training or of a peer."""
    facts, workers = outcome.step.facts, int(outcome.step.facts["workers"])
    data = str(outcome.step.settings.get("workload.data", ""))
    base = Measured(model=str(facts["model"]), kind=str(facts["kind"]), workers=workers, data=data)
    if outcome.failed:
        return base
    return _peer(outcome, base) if outcome.step.kind == "peer" else _training(outcome, base)


def _training(outcome: StepOutcome, base: Measured) -> Measured:
    run = outcome.run
    if run is None or not run.sessions:
        return base
    quotas = _quotas(outcome)
    kernel = [found for each in run.sessions if (found := kernel_counts(each))]
    whole = len(kernel) == base.workers and base.workers > 0
    parameters = finite(outcome.result.get("parameters"))
    worker = _mean(kernel) if whole and base.kind != "alone" else None
    server = None
    if worker is not None and base.kind == "server":
        server = _mirrored(kernel)
    shares = [share for each in run.sessions if (share := cpu_share(each, quotas)) is not None]
    workers = [each for each in run.sessions if each.start.role == "worker"]
    own = [found for each in workers if (found := own_counts(each))]
    return Measured(
        model=base.model,
        kind=base.kind,
        workers=base.workers,
        gradient=int(parameters) * 4 if parameters else None,
        speed=steady_speed(run.sessions[0], (run.batch or 0)),
        cpu=sum(shares) / len(shares) if shares else None,
        server_cpu=_server_cpu(outcome) if base.kind == "server" else None,
        worker=worker,
        server=server,
        counted=_mean(own) if own and base.kind != "alone" else None,
        agreement=_agreement(outcome) if base.kind == "server" else None,
        data=base.data,
    )


def _peer(outcome: StepOutcome, base: Measured) -> Measured:
    result = outcome.result
    epochs = result.get("epochs")
    updates = sum(int(each["updates"]) for each in epochs) if isinstance(epochs, list) else 0
    sent, used = outcome.number("bytes_sent"), outcome.number("cpu_utilisation")
    quota = sum(_quotas(outcome).values()) / max(1, base.workers)
    visible = outcome.step.visible or 1
    counts = None
    if sent is not None and updates:
        each = sent / updates / base.workers
        counts = Counts(bytes_sent=each, bytes_received=each)  # what one sends another receives
    return Measured(
        model=base.model,
        kind=base.kind,
        workers=base.workers,
        speed=outcome.number("images_per_second"),
        cpu=used * visible / quota if used is not None and quota else None,
        worker=counts,
        data=base.data,
    )


def _quotas(outcome: StepOutcome) -> dict[str, float]:
    """Cores of every lab host."""
    return {
        name: cores
        for name, counters in outcome.counters.items()
        if (cores := finite(counters.get("cores")))
    }


def update_spans(session: RankSession) -> list[Span]:
    """The span of every update, in order: it holds its computing, exchange and optimizer."""
    spans = [span for span in session.spans if span.name == "compute" and span.update is not None]
    return sorted(spans, key=lambda span: span.start)


def kernel_counts(session: RankSession) -> Counts | None:
    """Traffic per update by the kernel's counters, read while the network is quiet.

    From the last sample before the gradients of an update (the first that has one) can leave to
    the last sample of the evaluation after the last update, which sends a few hundred bytes.
    Start-up, first weights and checkpoints lie outside.
    """
    updates = update_spans(session)
    tested = [span.end for span in session.spans if span.name == "evaluate"]
    if not updates or not tested:
        return None
    last = _last_sample(session.samples, updates[-1].end, max(tested))
    if last is None:
        return None
    for number, update in enumerate(updates):  # where the first forward pass was too short: later
        leaves = _leaves(session, update)
        quiet = updates[number - 1].end if number else _settled(session, leaves)
        first = _last_sample(session.samples, quiet, leaves)
        if first is not None:
            done = len(updates) - number
            return _difference(first.network[INTERFACE], last.network[INTERFACE], done)
    return None


def _leaves(session: RankSession, update: Span) -> float:
    """When its first gradient can leave: with the exchange, or else after the forward pass began.

    An exchange that runs behind the backward pass has begun before anybody waits for it; a tenth
    of the update is still its forward pass.
    """
    lines = [each for each in session.exchanged if each.update == update.update]
    starts = [s.start for s in session.spans if s.name == "exchange" and s.update == update.update]
    if lines and starts and all(each.hidden_seconds < 0.001 for each in lines):
        return min(starts)
    return update.start + update.seconds / 10


def _settled(session: RankSession, before: float) -> float:
    """When the first weights had come; 0 where none came from others."""
    early = [each for each in session.exchanged if each.update is None and each.time < before]
    moved = sum(each.bytes_sent + each.bytes_received for each in early)
    return max(each.time for each in early) if moved > SMALL else 0.0


def _last_sample(samples: Sequence[Sample], after: float, before: float) -> Sample | None:
    """The last one that was certainly read in time: a host at its quota may stop in between."""
    fitting = [each for each in samples if after <= each.time <= before - MARGIN]
    fitting = [each for each in fitting if INTERFACE in each.network]
    return fitting[-1] if fitting else None


def _difference(first: InterfaceTraffic, last: InterfaceTraffic, updates: int) -> Counts:
    return Counts(
        bytes_sent=(last.bytes_sent - first.bytes_sent) / updates,
        bytes_received=(last.bytes_received - first.bytes_received) / updates,
        packets_sent=(last.packets_sent - first.packets_sent) / updates,
        packets_received=(last.packets_received - first.packets_received) / updates,
    )


def own_counts(session: RankSession) -> Counts | None:
    """Traffic per update as the exchange counted it."""
    lines = [each for each in session.exchanged if each.update is not None]
    if not lines:
        return None
    return Counts(
        bytes_sent=sum(each.bytes_sent for each in lines) / len(lines),
        bytes_received=sum(each.bytes_received for each in lines) / len(lines),
    )


def cpu_share(session: RankSession, quotas: Mapping[str, float]) -> float | None:
    """Part of its host's quota that a worker used from the first update to the last."""
    updates, quota = update_spans(session), quotas.get(session.start.host)
    if not updates or not quota:
        return None
    begin, end = updates[0].start, updates[-1].end
    used = seconds = 0.0
    for before, sample in itertools.pairwise(session.samples):
        if before.time >= begin and sample.time <= end:
            used += sample.cpu * (sample.time - before.time)
            seconds += sample.time - before.time
    return used / seconds / quota if seconds else None


def steady_speed(session: RankSession, batch: int) -> float | None:
    """Images per second from the end of the first update to the end of the last."""
    ends = [span.end for span in update_spans(session)]
    if len(ends) < 2 or not batch or ends[-1] <= ends[0]:
        return None
    return batch * (len(ends) - 1) / (ends[-1] - ends[0])


def _mean(counts: Sequence[Counts]) -> Counts:
    def mean(values: Sequence[float | None]) -> float:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else 0.0

    return Counts(
        bytes_sent=mean([each.bytes_sent for each in counts]),
        bytes_received=mean([each.bytes_received for each in counts]),
        packets_sent=mean([each.packets_sent for each in counts]),
        packets_received=mean([each.packets_received for each in counts]),
    )


def _mirrored(workers: Sequence[Counts]) -> Counts:
    """A server's traffic from its workers': they talk to nobody else."""
    return Counts(
        bytes_sent=sum(each.bytes_received for each in workers),
        bytes_received=sum(each.bytes_sent for each in workers),
        packets_sent=sum(each.packets_received or 0.0 for each in workers),
        packets_received=sum(each.packets_sent or 0.0 for each in workers),
    )


def _server_cpu(outcome: StepOutcome) -> float | None:
    counters = outcome.counters.get("server", {})
    used, cores = finite(counters.get("cpu_seconds")), finite(counters.get("cores"))
    return used / outcome.seconds / cores if used and cores and outcome.seconds else None


def _agreement(outcome: StepOutcome) -> float | None:
    """How the server's own counters compare with its workers', over the whole step."""
    own = finite(outcome.counters.get("server", {}).get("bytes_received"))
    others = [
        finite(counters.get("bytes_sent")) or 0.0
        for name, counters in outcome.counters.items()
        if name != "server"
    ]
    return own / sum(others) if own and sum(others) else None
