"""Unequal hosts: shares in proportion to speed, beside equal parts and stock DDP."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from benchmarks.lab.cluster import TrialRow, run_in_lab, summarise
from benchmarks.lab.trials import Bench, Trial
from paceline.lab import LabSpec
from paceline.schema import NodePlan, Plan
from paceline.text import rate

MNIST: dict[str, object] = {
    "workload.model": "mnist_cnn",
    "workload.data": "synthetic",
    "optimizer.name": "adam",
    "exchange.partition": "none",
}

SETTLE = 3
"""Turns in which shares may still change."""
TURN = 10.0
"""Seconds that a turn of a trial should not exceed where one update is that long: a host with a
twentieth of the speed takes minutes for half of every batch, and a median needs no more of them."""


def lab_of(cores: tuple[float, ...], rate: str = "1gbit") -> LabSpec:
    """Hosts with parts of a core, on one switch."""
    hosts = [{"name": chr(ord("a") + n), "cores": part} for n, part in enumerate(cores)]
    return LabSpec.from_tables({"host": hosts, "link": {"rate": rate}})


def updates_within(seconds: float, most: int) -> int:
    """How many updates a turn has: `most`, or what fits into `TURN`, at least one.

    >>> updates_within(0.5, 4), updates_within(4.0, 4), updates_within(60.0, 4)
    (4, 2, 1)
    """
    return max(1, min(most, int(TURN / seconds))) if seconds > 0 else most


def run_shares(
    cores: tuple[float, ...],
    *,
    batch: int = 512,
    rounds: int = 3,
    updates: int = 4,
    say: Callable[[str], None] = lambda text: None,
) -> list[TrialRow]:
    """Each host alone, then together: by measured shares, by equal parts, and stock DDP."""
    spec = lab_of(cores)

    def trial(
        name: str,
        shares: tuple[float, ...],
        kind: str = "plan",
        *,
        most: int = 4,
        settle: int = 0,
        rounds: int | None = None,
    ) -> Trial:
        nodes = tuple(
            _node(h.name, part, s) for h, part, s in zip(spec.hosts, cores, shares, strict=True)
        )
        return Trial(
            name=name,
            kind=kind,
            settings=MNIST
            | {
                "workload.batch_size": batch,
                "data.options": {"shape": [1, 28, 28], "samples": max(2048, batch)},
            },
            plan=Plan(nodes=nodes, batch_size=batch),
            updates=min(most, updates),
            settle=settle,
            rounds=rounds,
            warmup=1 if rounds is None else 0,  # where an update takes half a minute none is needed
        )

    # What each does alone decides the first shares, as a plan's measurement would; then they
    # follow the speeds in company, as between epochs: a slow host is slower still when it has
    # gradients to send.
    first = trial("alone", tuple(cores), "alone", most=2)
    timings = run_in_lab(spec, Bench(trials=(first,), rounds=2), say=say)
    speeds = []
    for host in spec.hosts:
        mine = [t for t in timings if t.host == host.name]
        speeds.append(max(t.samples / t.seconds for t in mine))
    say(
        "alone: "
        + ", ".join(f"{h.name} {rate(s)} images/s" for h, s in zip(spec.hosts, speeds, strict=True))
    )
    equal = updates_within(equal_seconds(batch, speeds), updates)
    few = equal if equal < updates else None
    many = updates_within(batch / sum(speeds), updates)
    trials = (
        trial("alone", tuple(speeds), "alone", most=many),
        trial("shares by speed", tuple(speeds), most=many, settle=SETTLE),
        trial("equal parts", (1.0,) * len(cores), most=equal, rounds=few),
        trial("stock DDP (equal parts)", (1.0,) * len(cores), "ddp", most=equal, rounds=few),
    )
    timings = run_in_lab(spec, Bench(trials=trials, rounds=rounds), say=say)
    return summarise(trials, timings)


def equal_seconds(batch: int, speeds: Sequence[float]) -> float:
    """An update with equal parts is as long as the slowest host takes for its part.

    >>> equal_seconds(512, (1000.0, 64.0))
    4.0
    """
    return batch / len(speeds) / min(speeds)


def _node(host: str, cores: float, share: float) -> NodePlan:
    """Quotas above one core are of no use to one thread."""
    threads = math.ceil(cores)
    strategy = "threads" if threads > 1 else "sequential"
    return NodePlan(host=host, share=share, strategy=strategy, threads=threads)
