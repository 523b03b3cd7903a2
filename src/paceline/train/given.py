"""Objects that a Python program hands over instead of names: what can be done with them.

They live in the process that made them. Other processes cannot get them, and a run cannot keep
them: what would need that is refused, and nothing takes their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, UnsupportedError
from paceline.references import OBJECT, is_object, object_name
from paceline.schema import Config, NodePlan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.data.base import DataRequest
    from paceline.local.base import Loss

KEYS = {
    "model": "workload.model",
    "data": "workload.data",
    "loss": "workload.loss",
    "optimizer": "optimizer.name",
}
"""Where a configuration names what may be given as an object."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """Objects that the caller of the Python API hands over instead of names."""

    model: Callable[..., nn.Module] | None = None
    data: Any = None
    """A dataset, a pair of them, or a function that makes them; see `with_open_data`."""
    loss: Loss | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None


def objects_of(config: Config, given: Given | None = None) -> dict[str, str]:
    """Which parts of a workload are objects, and what a run says of each.

    >>> objects_of(Config()), objects_of(Config(), Given(loss=print))
    ({}, {'loss': 'builtins.print'})
    """
    work = config.workload
    names = {
        "model": work.model,
        "data": work.data,
        "loss": work.loss,
        "optimizer": config.optimizer.name,
    }
    for part in names:
        if (value := getattr(given, part, None)) is not None and not is_object(names[part]):
            names[part] = object_name(value)
    return {part: name.removeprefix(OBJECT) for part, name in names.items() if is_object(name)}


def refuse_without_objects(config: Config, given: Given | None) -> None:
    """A run whose objects are not there cannot be trained, nor with anything else instead."""
    missing = {
        part: name
        for part, name in objects_of(config).items()
        if getattr(given, part, None) is None
    }
    if missing:
        listed = " and ".join(f"the {part} {name}" for part, name in missing.items())
        raise ConfigError(
            f"{listed} came as an object of a Python program, which config.toml cannot hold: train"
            " or continue it from that program, paceline.train(..., resume=True), or put the object"
            " into a module and name it as 'module:callable'"
        )


def refuse_other_processes(config: Config, strategy: str, given: Given | None) -> None:
    """Strategies with processes of their own cannot get at objects of this one."""
    if NodePlan(strategy=strategy).shares_memory:
        _refuse(config, given, f"local strategy {strategy!r} trains in processes of its own")


def refuse_other_hosts(config: Config, given: Given | None) -> None:
    """Nor can other machines."""
    _refuse(config, given, "other hosts train in processes of their own")


def _refuse(config: Config, given: Given | None, who: str) -> None:
    for part, name in objects_of(config, given).items():
        raise UnsupportedError(
            f"{who}, which cannot get the {part} {name} of this Python program: put it, or a"
            " function that makes it, into a module that can be imported from the current folder,"
            " or use local.strategy = 'threads' or 'replicas' here"
        )


def with_open_data(given: Given, config: Config, request: DataRequest) -> Given:
    """`given` with its data opened, which calls a function of the user's once."""
    from paceline.data.base import Dataset
    from paceline.data.own import open_own

    if given.data is None or isinstance(given.data, Dataset):
        return given
    opened = open_own(given.data, request, objects_of(config, given)["data"])
    return dataclasses.replace(given, data=opened)
