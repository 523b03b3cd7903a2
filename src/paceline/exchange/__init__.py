"""Exchanges: how nodes agree on the weights. One file each, one registry.

Importing this package imports no torch; building an exchange does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline.errors import UnsupportedError, unknown_name

if TYPE_CHECKING:
    from paceline.exchange.base import Exchange, ExchangeSetting

# name -> module:class; imported only when used
REGISTRY: dict[str, str] = {
    "allreduce": "paceline.exchange.allreduce:AllReduce",
    "ring": "paceline.exchange.ring:Ring",
    "reduce_broadcast": "paceline.exchange.reduce_broadcast:ReduceBroadcast",
    "averaging": "paceline.exchange.averaging:Averaging",
    "parameter_server": "paceline.exchange.servers.parameter_server:ParameterServer",
    "hogwild": "paceline.exchange.gossip.hogwild:HogwildExchange",
}

# (name, compression) where that takes another class
COMPRESSED: dict[tuple[str, str], str] = {
    ("allreduce", "bf16"): "paceline.exchange.allreduce:AllReduce",
    ("allreduce", "powersgd"): "paceline.exchange.compression.powersgd:PowerSGD",
}


def names() -> list[str]:
    """The names of all exchanges."""
    return list(REGISTRY)


def exchange_class(name: str, compression: str = "none") -> type[Exchange]:
    """The class of an exchange by its name, and by what makes its gradients smaller."""
    if name not in REGISTRY:
        raise UnsupportedError(unknown_name("exchange", name, REGISTRY))
    if compression != "none" and (name, compression) not in COMPRESSED:
        raise UnsupportedError(
            f"exchange.compression = {compression!r} does not work with exchange.kind = {name!r}:"
            " use 'allreduce', or compression = 'none'"
        )
    place = REGISTRY[name] if compression == "none" else COMPRESSED[name, compression]
    module, _, attribute = place.partition(":")
    found: type[Exchange] = getattr(importlib.import_module(module), attribute)
    return found


def build(name: str, setting: ExchangeSetting) -> Exchange:
    """The exchange of a plan, built on one node's leader."""
    return exchange_class(name, setting.options.compression)(setting)


__all__ = ["REGISTRY", "build", "exchange_class", "names"]
