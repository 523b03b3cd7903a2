"""Objects that a Python program hands over instead of names: what can be done with them.

They live in the process that made them. Other processes of the machine get them from it
(`launch.parcel`); other hosts cannot, and a run cannot keep them: what would need that is refused,
and nothing takes their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, UnsupportedError
from paceline.references import OBJECT, is_object, object_name
from paceline.schema import Config

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.data.base import DataRequest
    from paceline.local.steps import Loss

KEYS = {
    "model": "workload.model",
    "data": "workload.data",
    "loss": "workload.loss",
    "step": "workload.step",
    "collate_fn": "workload.collate_fn",
    "metrics": "workload.metrics",
    "optimizer": "optimizer.name",
    "scheduler": "optimizer.scheduler",
}
"""Where a configuration names what may be given as an object."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """Objects that the caller of the Python API hands over instead of names."""

    model: Callable[..., nn.Module] | None = None
    data: Any = None
    """A dataset, a pair of them, or a function that makes them; see `with_open_data`."""
    loss: Loss | None = None
    step: Callable[..., Any] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    metrics: Mapping[str, Callable[..., Any]] | None = None
    """Those that came as objects, by name."""
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    scheduler: Callable[..., Any] | None = None


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
        "step": work.step,
        "collate_fn": work.collate_fn,
        "optimizer": config.optimizer.name,
        "scheduler": config.optimizer.scheduler,
    }
    for part in names:
        if (value := getattr(given, part, None)) is not None and not is_object(names[part]):
            names[part] = object_name(value)
    names |= {f"metric {name!r}": value for name, value in work.metrics.items()}
    return {part: name.removeprefix(OBJECT) for part, name in names.items() if is_object(name)}


def _has(given: Given | None, part: str) -> bool:
    if part.startswith("metric "):
        return any(f"metric {name!r}" == part for name in (given and given.metrics) or ())
    return getattr(given, part, None) is not None


def refuse_without_objects(config: Config, given: Given | None) -> None:
    """A run whose objects are not there cannot be trained, nor with anything else instead."""
    missing = {part: name for part, name in objects_of(config).items() if not _has(given, part)}
    if missing:
        listed = " and ".join(f"the {part} {name}" for part, name in missing.items())
        raise ConfigError(
            f"{listed} came as an object of a Python program, which config.toml cannot hold: train"
            " or continue it from that program, paceline.train(..., resume=True), or put the object"
            " into a module and name it as 'module:callable'"
        )


def refuse_bound(given: Given) -> None:
    """A finished module is trained as a copy: what else holds it would see weights that stay."""
    from torch import nn, optim

    from paceline.training.outside import Outside

    bound = {"optimizer": optim.Optimizer, "scheduler": optim.lr_scheduler.LRScheduler}
    for part, kind in bound.items():
        if isinstance(value := getattr(given, part), kind):
            name = type(value).__name__
            raise ConfigError(
                f"the {part} is a finished {name}, bound to weights that are not the ones which"
                f" processes train: give its class, as {part}={name}, or a function, as"
                f" functools.partial({name}, ...)"
            )
    module = given.model
    if not isinstance(module, nn.Module):
        return
    inside = [*module.modules(), *module.parameters(), *module.buffers()]
    others = {part: getattr(given, part) for part in KEYS if part not in ("model", "data")}
    others |= {f"metric {name!r}": each for name, each in (others.pop("metrics") or {}).items()}
    for part, value in others.items():
        if value is None or (found := Outside([value]).reached(inside)) is None:
            continue
        name = next((name for name, each in module.named_modules() if each is found), "")
        raise UnsupportedError(
            f"the {part} {object_name(value).removeprefix(OBJECT)} uses"
            f" {f'layer {name} of ' if name else ''}the model that is given, of which copies are"
            " trained: let it use the model that it is called with (a step is), or give a function"
            " that makes the model"
        )


def refuse_other_hosts(config: Config, given: Given | None) -> None:
    """Objects go to processes of this machine alone."""
    for part, name in objects_of(config, given).items():
        raise UnsupportedError(
            f"other hosts cannot get the {part} {name} of this Python program: put it, or a"
            " function that makes it, into a module that can be imported from the current folder"
        )


def parcel_of(given: Given | None) -> dict[str, Any]:
    """The objects by part, as they go to other processes of this machine."""
    if given is None:
        return {}
    named = {each.name: getattr(given, each.name) for each in dataclasses.fields(given)}
    return {part: value for part, value in named.items() if value is not None}


def with_open_data(given: Given, config: Config, request: DataRequest) -> Given:
    """`given` with its data opened, which calls a function of the user's once."""
    from paceline.data.base import Dataset
    from paceline.data.own import open_own

    if given.data is None or isinstance(given.data, Dataset):
        return given
    opened = open_own(given.data, request, objects_of(config, given)["data"])
    return dataclasses.replace(given, data=opened)
