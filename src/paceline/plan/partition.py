"""Which linear layers are split over nodes, from bytes alone. Pure; no torch.

Where machines have been measured, `plan.prices` decides by time; this is for what is known
without measuring: the model, the batch, the shares, and what was asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.cost.split import Chain, Division, Placed, arrange, can_split, step_bytes
from paceline.errors import ConfigError
from paceline.schema import ExchangeSettings, Plan
from paceline.schema.support import STRATEGIES as ALL
from paceline.schema.support import SUMS, Combination, refusal
from paceline.text import listed

STRATEGIES = tuple(
    name for name in ALL if not refusal(Combination(strategy=name, partition="feature"))
)
"""Local strategies that work with split layers: one rank with one copy of the model."""
EXCHANGES = ("auto", *SUMS)
"""Exchanges that sum the gradients of what is not split at every update."""


@dataclass(frozen=True, kw_only=True)
class PartitionChoice:
    """The layers that are split, and why those."""

    layers: tuple[str, ...] = ()
    reason: str = ""
    bytes_sent: tuple[float, ...] = ()
    """What every node sends per update."""


def choose_partition(
    settings: ExchangeSettings,
    chains: Sequence[Chain],
    division: Division,
    *,
    parameters: int,
    possible: str = "",
    obstacles: Mapping[str, str] | None = None,
) -> PartitionChoice:
    """Which layers are split over the nodes of `division`.

    `parameters` are all weights of the model; `possible` says in words why none can be
    split whatever the bytes are, and is empty where some can. `obstacles` says of single layers
    why they stay whole.
    """
    _check(settings, chains, division.nodes, possible, obstacles or {})
    if settings.partition == "none" or division.nodes == 1:
        return PartitionChoice()
    if possible:
        return PartitionChoice(reason=f"no layer is split: {possible}")
    forced = frozenset(settings.layers) if settings.partition == "manual" else None
    placed = [arrange(chain, division, split=forced) for chain in chains]
    others = parameters - sum(layer.parameters for chain in chains for layer in chain)
    whole = [tuple(Placed(layer=layer) for layer in chain) for chain in chains]
    plain = max(step_bytes(whole, division, other_parameters=others))
    sent = tuple(step_bytes(placed, division, other_parameters=others))
    names = tuple(each.name for chain in placed for each in chain if each.way != "batch")
    if not names:
        reason = "no layer is split: its activations would be more bytes than its gradients"
        return PartitionChoice(reason=reason, bytes_sent=sent)
    verb = "is" if len(names) == 1 else "are"
    reason = (
        f"{listed(names)} {verb} split: {max(sent) / 1e6:.1f} MB instead of"
        f" {plain / 1e6:.1f} MB per update"
    )
    return PartitionChoice(layers=names, reason=reason, bytes_sent=sent)


def with_partition(plan: Plan, choice: PartitionChoice) -> Plan:
    """The plan with a choice written into it."""
    predicted = dict(plan.predicted)
    if choice.bytes_sent:
        predicted["bytes_per_update"] = max(choice.bytes_sent)
    return dataclasses.replace(
        plan,
        partition="feature" if choice.layers else "none",
        feature_layers=choice.layers,
        reason="; ".join(part for part in (plan.reason, choice.reason) if part),
        predicted=predicted,
    )


def obstacle(plan: Plan, settings: ExchangeSettings, *, elementwise: bool) -> str:
    """Why no layer of this plan can be split, in words; empty where some can."""
    for node in plan.nodes:
        if node.strategy not in STRATEGIES:
            return f"{node.host} uses {node.strategy}, which needs whole weights"
    if settings.kind not in EXCHANGES or plan.exchange not in EXCHANGES:
        return f"the exchange {plan.exchange} does not sum gradients at every update"
    if plan.compile:
        return "numerics.compile needs whole weights"
    return "" if elementwise else "an optimizer of one's own needs whole weights"


def _check(
    settings: ExchangeSettings,
    chains: Sequence[Chain],
    nodes: int,
    possible: str,
    obstacles: Mapping[str, str],
) -> None:
    if settings.partition != "manual":
        if settings.layers:
            raise ConfigError(
                f"exchange.layers = {list(settings.layers)} means nothing to exchange.partition ="
                f" {settings.partition!r}: use 'manual', or leave the layers out"
            )
        return
    if not settings.layers:
        raise ConfigError("exchange.partition = 'manual' needs exchange.layers: name some")
    if possible and nodes > 1:
        raise ConfigError(f"exchange.partition = 'manual' cannot be followed: {possible}")
    valid = [layer.name for chain in chains for layer in chain if can_split(layer, nodes)]
    for name in settings.layers:
        if name in obstacles and nodes > 1:
            raise ConfigError(
                f"exchange.layers has {name!r}, which cannot be split because {obstacles[name]};"
                f" layers that can: {', '.join(valid) or 'none'}"
            )
        if name not in valid:
            raise ConfigError(
                f"exchange.layers has {name!r}, which cannot be split over {nodes} nodes; layers"
                f" that can: {', '.join(valid) or 'none'}"
            )
