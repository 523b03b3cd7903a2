"""How fast each set-up was, from what its step left."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.report.load import finite
from studies.outcome import NOT_RUN, Outcomes, StepOutcome

WORKS = ("complex_small", "simple_big")
MODELS = {"complex_small": "VGG16", "simple_big": "AlexNet"}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way of using cores or hosts."""

    key: str
    """The fact `setup` of its steps."""
    title: str
    short: str
    """For legends."""
    place: str
    """"local" or "hosts"."""
    published: str = ""
    """Key of the study's speedup; nothing where it has none on a CPU."""
    cores: int = 2
    """Cores whose time it may use here, all hosts together."""


SETUPS = (
    Variant(key="baseline", short="one core", title="one core, sequential", place="local", cores=1),
    Variant(key="threads", short="threads", title="one process, threads inside each layer",
          place="local"),
    Variant(key="replicas", short="replicas", title="one process, a replica per thread",
          place="local", published="one_process"),
    Variant(key="processes", short="processes", title="several processes", place="local",
          published="processes"),
    Variant(key="model", short="model", title="model parallel, the study's cut", place="local"),
    Variant(key="hybrid", short="data and model", title="data and model parallel", place="local"),
    Variant(key="paceline", short="2 hosts, Paceline", title="two hosts: Paceline, raced",
          place="hosts", published="mpi"),
    Variant(key="study", short="2 hosts, study", title="two hosts: processes, then MPI",
          place="hosts", published="mpi"),
    Variant(key="ddp", short="2 hosts, DDP", title="two hosts: stock DDP",
          place="hosts"),
    Variant(key="horovod", short="Horovod", title="two hosts: Horovod", place="hosts",
          published="horovod"),
    Variant(key="spark", short="Spark", title="two hosts: Spark", place="hosts", published="spark"),
    Variant(key="ray", short="Ray", title="two hosts: Ray", place="hosts"),
)  # fmt: skip
GPU_SETUPS = (
    ("data_parallel", "GPUs, data parallel"),
    ("model_parallel", "GPUs, model parallel, pipelined"),
    ("hybrid", "GPUs, data and model"),
    ("mpi", "GPUs of two machines by MPI"),
    ("horovod", "GPUs, Horovod"),
)


def find(outcomes: Outcomes, work: str, setup: str) -> StepOutcome | None:
    """The step of a set-up, of several settings the fastest; None where there is none here."""
    found = outcomes.where(work=work, setup=setup)
    return max(found, key=lambda each: images_per_second(each) or 0.0, default=None)


def ranks_of(outcome: StepOutcome) -> str | None:
    """How a peer used each host: "2 processes x 1 thread"."""
    processes, threads = outcome.number("processes"), outcome.number("threads")
    if processes is None or threads is None:
        return None
    each = int(processes) // max(1, len(outcome.step.hosts))
    many = "processes" if each > 1 else "process"
    return f"{each} {many} x {int(threads)} thread{'s' if threads > 1 else ''}"


def images_per_second(outcome: StepOutcome | None) -> float | None:
    """Median over the epochs; the first, which warms up, is left out if there are others."""
    if outcome is None or not outcome.done:
        return None
    values = [finite(epoch.get("images_per_second")) for epoch in _epochs(outcome)]
    kept = [value for value in values[1:] or values if value]
    return statistics.median(kept) if kept else None


def _epochs(outcome: StepOutcome) -> tuple[Mapping[str, Any], ...]:
    if outcome.run is not None:
        return outcome.run.metrics
    found = outcome.result.get("epochs")
    return tuple(found) if isinstance(found, list) else ()


def speedup(outcomes: Outcomes, work: str, setup: str) -> float | None:
    """Against one core on this machine."""
    base = images_per_second(find(outcomes, work, "baseline"))
    own = images_per_second(find(outcomes, work, setup))
    return own / base if own and base else None


def batch_of(outcome: StepOutcome) -> int:
    return int(outcome.step.settings["workload.batch_size"])


def measured_updates(outcome: StepOutcome) -> int:
    """Updates that count: those of the epochs after the first."""
    settings = outcome.step.settings
    per_epoch = -(-int(settings["data.limit"]) // batch_of(outcome))
    return per_epoch * max(1, int(settings["train.epochs"]) - 1)


def why_not(outcome: StepOutcome | None) -> str | None:
    """What a cell says where there is no number."""
    if outcome is None:
        return "not in the short form"
    if outcome.failed.startswith("not installed"):
        return "not installed"
    return None if outcome.failed in ("", NOT_RUN) else "failed"


def bytes_per_update(outcome: StepOutcome | None) -> float | None:
    """Sent by the host that sends most; for peers the mean of the hosts."""
    if outcome is None or not outcome.done:
        return None
    if outcome.run is not None:
        ranks = outcome.run.ledger.ranks if outcome.run.ledger else ()
        counted = [rank.exchange for rank in ranks if rank.exchange.updates]
        return max((each.bytes_sent / each.updates for each in counted), default=None)
    total = outcome.number("bytes_sent")
    updates = sum(finite(epoch.get("updates")) or 0.0 for epoch in _epochs(outcome))
    hosts = max(1, len(outcome.step.hosts))
    return total / hosts / updates if total and updates else None
