"""Exchanges: how nodes agree on the weights. One file each, one registry.

Importing this package imports no torch; building an exchange does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from paceline.errors import UnsupportedError
from paceline.schema.exchanges import EXCHANGES
from paceline.schema.registry import imported

if TYPE_CHECKING:
    from paceline.exchange.base import Exchange, ExchangeSetting

# (name, compression) where that takes another class
COMPRESSED: dict[tuple[str, str], str] = {
    ("allreduce", "bf16"): "paceline.exchange.allreduce:AllReduce",
    ("allreduce", "powersgd"): "paceline.exchange.compression.powersgd:PowerSGD",
}


def exchange_class(name: str, compression: str = "none") -> type[Exchange]:
    """The class of an exchange by its name, and by what makes its gradients smaller."""
    if compression != "none" and (name, compression) not in COMPRESSED:
        raise UnsupportedError(
            f"exchange.compression = {compression!r} does not work with exchange.kind = {name!r}:"
            " use 'allreduce', or compression = 'none'"
        )
    place = EXCHANGES[name] if compression == "none" else COMPRESSED[name, compression]
    return cast("type[Exchange]", imported(place, f"exchange {name!r}"))


def build(name: str, setting: ExchangeSetting) -> Exchange:
    """The exchange of a plan, built on one node's leader."""
    return exchange_class(name, setting.options.compression)(setting)


__all__ = ["EXCHANGES", "build", "exchange_class"]
