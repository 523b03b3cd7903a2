"""Exchanges: how nodes agree on the weights. One file each, one registry.

Importing this package imports no torch; building an exchange does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline.errors import UnsupportedError, unknown_name

if TYPE_CHECKING:
    from paceline.exchange.base import Exchange, Setting

# name -> module:class; imported only when used
REGISTRY: dict[str, str] = {
    "allreduce": "paceline.exchange.allreduce:AllReduce",
}


def names() -> list[str]:
    """The names of all exchanges."""
    return list(REGISTRY)


def exchange_class(name: str) -> type[Exchange]:
    """The class of an exchange by its name."""
    if name not in REGISTRY:
        raise UnsupportedError(unknown_name("exchange", name, REGISTRY))
    module, _, attribute = REGISTRY[name].partition(":")
    found: type[Exchange] = getattr(importlib.import_module(module), attribute)
    return found


def build(name: str, setting: Setting) -> Exchange:
    """The exchange of a plan, built on one node's leader."""
    return exchange_class(name)(setting)


__all__ = ["REGISTRY", "build", "exchange_class", "names"]
