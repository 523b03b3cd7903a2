"""Unequal hosts: shares in proportion to speed, beside equal parts and stock DDP."""

from __future__ import annotations

from collections.abc import Callable

from paceline.bench.cluster import Row, run_in_lab, summarise
from paceline.bench.trials import Bench, Trial
from paceline.lab import LabSpec
from paceline.schema import NodePlan, Plan

MNIST: dict[str, object] = {
    "workload.model": "mnist_cnn",
    "workload.data": "synthetic",
    "data.options": {"shape": [1, 28, 28], "samples": 2048},
    "optimizer.name": "adam",
    "exchange.partition": "none",
}


def lab_of(cores: tuple[float, ...], rate: str = "1gbit") -> LabSpec:
    """Hosts with parts of a core, on one switch."""
    hosts = [{"name": chr(ord("a") + n), "cores": part} for n, part in enumerate(cores)]
    return LabSpec.from_tables({"host": hosts, "link": {"rate": rate}})


def run_shares(
    cores: tuple[float, ...],
    *,
    batch: int = 512,
    rounds: int = 3,
    updates: int = 4,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Each host alone, then together: by measured shares, by equal parts, and stock DDP."""
    spec = lab_of(cores)

    def trial(name: str, shares: tuple[float, ...], kind: str = "plan") -> Trial:
        nodes = tuple(
            NodePlan(host=h.name, share=s) for h, s in zip(spec.hosts, shares, strict=True)
        )
        return Trial(
            name=name,
            kind=kind,
            settings=MNIST | {"workload.batch_size": batch},
            plan=Plan(nodes=nodes, batch_size=batch),
            updates=updates,
        )

    # What each does alone decides the shares, as a plan's measurement would.
    first = trial("alone", tuple(cores), "alone")
    timings = run_in_lab(spec, Bench(trials=(first,), rounds=2), say=say)
    speeds = []
    for host in spec.hosts:
        mine = [t for t in timings if t.host == host.name]
        speeds.append(max(t.samples / t.seconds for t in mine))
    say(
        "alone: "
        + ", ".join(f"{h.name} {s:,.0f} images/s" for h, s in zip(spec.hosts, speeds, strict=True))
    )
    trials = (
        trial("alone", tuple(speeds), "alone"),
        trial("shares by speed", tuple(speeds)),
        trial("equal parts", (1.0,) * len(cores)),
        trial("stock DDP (equal parts)", (1.0,) * len(cores), "ddp"),
    )
    timings = run_in_lab(spec, Bench(trials=trials, rounds=rounds), say=say)
    return summarise(trials, timings)
