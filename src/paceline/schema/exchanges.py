"""The exchanges by name: how nodes agree on the weights. No torch."""

from __future__ import annotations

from paceline.schema.registry import Registry

EXCHANGES: Registry[str] = Registry("exchange", "paceline.exchanges", {
    "allreduce": "paceline.exchange.allreduce:AllReduce",
    "ring": "paceline.exchange.ring:Ring",
    "reduce_broadcast": "paceline.exchange.reduce_broadcast:ReduceBroadcast",
    "averaging": "paceline.exchange.averaging:Averaging",
    "parameter_server": "paceline.exchange.servers.parameter_server:ParameterServer",
    "hogwild": "paceline.exchange.gossip.hogwild:HogwildExchange",
}, str)  # fmt: skip
""""module:class" of each `paceline.exchange.base.Exchange`, imported only when it is used."""
