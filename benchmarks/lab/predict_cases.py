"""What `paceline bench predict` predicts and times: models, hosts, links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigError, unknown_name
from paceline.lab import LabSpec

HOSTS: dict[str, tuple[float, ...]] = {
    "one": (1.0,),
    "two": (1.0, 1.0),
    "unequal": (1.0, 0.25),
    "four": (0.5, 0.5, 0.5, 0.5),
}
"""Cores of every host of a lab."""
RATES = ("100mbit", "300mbit", "1gbit")
ALONE, ALLREDUCE, PARTITION, SERVER = "alone", "allreduce", "partition", "parameter_server"
EXCHANGES = (ALLREDUCE, PARTITION, SERVER)


@dataclass(frozen=True, kw_only=True)
class CaseWorkload:
    """A model with its batch."""

    model: str
    batch: int
    shape: tuple[int, int, int]
    optimizer: str = "sgd"

    def settings(self) -> dict[str, object]:
        """As in a configuration: made images, plain numerics, so that only exchanges differ."""
        extra = {"optimizer.momentum": 0.9} if self.optimizer == "sgd" else {}
        return {
            "workload.model": self.model,
            "workload.data": "synthetic",
            "workload.batch_size": self.batch,
            "data.options": {
                "shape": list(self.shape),
                "classes": 10,
                "samples": 4 * self.batch,
                "test_samples": 10,
            },
            "optimizer.name": self.optimizer,
            "numerics.precision": "fp32",
            "numerics.memory_format": "contiguous",
            "train.deadline": 600.0,
            **extra,
        }


WORKLOADS = {
    "mnist_cnn": CaseWorkload(model="mnist_cnn", batch=128, shape=(1, 28, 28), optimizer="adam"),
    "resnet18": CaseWorkload(model="resnet18", batch=64, shape=(1, 28, 28)),
    "alexnet": CaseWorkload(model="alexnet", batch=32, shape=(3, 224, 224)),
}
WORKLOADS |= {
    f"mnist_cnn, batch {size}": replace(WORKLOADS["mnist_cnn"], batch=size)
    for size in (64, 512, 2048)
}
MODELS = ("mnist_cnn", "resnet18", "alexnet")
Case = tuple[str, str, str]
"""Model, hosts, rate."""
VERDICTS: tuple[Case, ...] = (
    ("mnist_cnn, batch 512", "two", "1gbit"),
    ("resnet18", "two", "100mbit"),
    ("mnist_cnn, batch 64", "two", "100mbit"),
    ("mnist_cnn, batch 2048", "two", "100mbit"),
)
"""Two hosts help; they hurt; they hurt, and with a larger batch they help."""
EVERY: tuple[Case, ...] = (
    *((model, "one", "") for model in MODELS),
    *((model, "two", rate) for rate in RATES for model in MODELS),
    *((model, "unequal", rate) for rate in ("100mbit", "1gbit") for model in MODELS[:2]),
    *((model, "four", rate) for rate in RATES for model in MODELS[:2]),
    ("alexnet", "four", "1gbit"),
)
"""AlexNet not where a slow host would take minutes to be measured or a slow link to be timed."""
QUICK: tuple[Case, ...] = (
    ("mnist_cnn", "one", ""),
    ("mnist_cnn", "two", "1gbit"),
    ("resnet18", "two", "1gbit"),
    ("alexnet", "two", "1gbit"),
    ("mnist_cnn", "two", "100mbit"),
    ("mnist_cnn", "unequal", "1gbit"),
    ("mnist_cnn", "four", "1gbit"),
    ("resnet18", "four", "300mbit"),
)


def chosen_cases(
    cases: Sequence[Case], models: Sequence[str], hosts: Sequence[str], rates: Sequence[str]
) -> list[Case]:
    """Those of `cases` that have one of the named models, hosts and rates; all where none is named.

    >>> chosen_cases(EVERY, ["alexnet"], ["two"], ["1gbit"])
    [('alexnet', 'two', '1gbit')]
    """
    given = (("model", models, MODELS), ("hosts", hosts, tuple(HOSTS)))
    for what, names, known in (*given, ("rate", rates, RATES)):
        for name in names:
            if name not in known:
                raise ConfigError(unknown_name(what, name, known))
    return [
        (model, name, rate)
        for model, name, rate in cases
        if (not models or model in models)
        and (not hosts or name in hosts)
        and (not rates or not rate or rate in rates)
    ]


def lab_of(cores: Sequence[float], rate: str) -> LabSpec:
    """Hosts with so many cores on one switch."""
    hosts = [{"name": chr(ord("a") + n), "cores": part} for n, part in enumerate(cores)]
    return LabSpec.from_tables({"host": hosts, "link": {"rate": rate}})
