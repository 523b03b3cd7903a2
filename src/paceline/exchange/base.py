"""What every exchange is: one way for nodes to agree on the weights.

A local strategy computes the gradient of its node's samples; the exchange makes
it everyone's. The parts are weighted with their samples over all samples of the
global batch already, so that their sum is the gradient of the mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from paceline.errors import DivergedError
from paceline.exchange.agreement import as_bytes
from paceline.exchange.buckets import Buckets, Waitable
from paceline.exchange.network import Network
from paceline.local.finite import DIVERGED, bad_of, is_finite
from paceline.schema import ExchangeSettings

Memory = dict[str, torch.Tensor]
"""What one node carries from update to update besides weights and the optimizer's state."""


@dataclass(frozen=True, kw_only=True)
class ExchangeSetting:
    """What an exchange is built from on one node's leader."""

    network: Network
    options: ExchangeSettings
    shares: tuple[float, ...] = ()
    """Every node's share of the global batch."""
    overlap: bool = True
    """The gradients appear one by one while the leader itself computes (one rank per node)."""
    saved: Callable[[], Memory] = dict
    """What the checkpoint that training goes on from has of this node's `memory`."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What this node has before it hears of the others."""

    update: int
    named: Sequence[tuple[str, torch.Tensor]]
    """The weights that are trained, with their names."""
    rest: Sequence[torch.Tensor]
    """Frozen weights and buffers."""
    optimizer: dict[str, dict[str, Any]]
    """The optimizer's state by parameter, from a checkpoint."""
    load_optimizer: Callable[[dict[str, dict[str, Any]]], None]
    model: str
    """What the model is, see `model_digest`."""

    def rest_bytes(self) -> torch.Tensor:
        """The bytes of `rest`, one after the other."""
        empty = torch.empty(0, dtype=torch.uint8)
        return torch.cat([empty, *(as_bytes(tensor) for tensor in self.rest)])


class Exchange(ABC):
    """One node's part of the agreement between nodes."""

    name: ClassVar[str]
    synchronous: ClassVar[bool] = True
    """Every node has the same weights after every update, those of one process."""
    own_loss: ClassVar[bool] = False
    """The loss is the mean over the node's own samples, not over the global batch."""
    summary: ClassVar[str] = ""

    @property
    def adds_up(self) -> bool:
        """Whether it adds up any number that is attached like a gradient, to the last digit."""
        return False

    def __init__(self, setting: ExchangeSetting) -> None:
        self.setting, self.network = setting, setting.network
        self._weights: list[torch.Tensor] = []

    def attach(self, weights: Sequence[torch.Tensor]) -> None:
        """The weights that are trained together, in the same order on every node."""
        self._weights = list(weights)

    def wrap(self, model: nn.Module) -> nn.Module:
        """What the forward pass runs through."""
        return model

    def before_update(self, samples: int) -> None:  # noqa: B027 - most weight gradients already
        """Before each update: what its loss is divided by (with `own_loss`, the node's samples)."""

    def start(self, beginning: Beginning) -> int:
        """Before the first update: agree with the other nodes, and say where this one begins."""
        return beginning.update

    def begin(self, *, update: int, rate: float, samples: int, total: int) -> None:  # noqa: B027
        """Before each update: its number, rate factor, the node's samples and everyone's."""

    @abstractmethod
    def finish(self) -> bool:
        """After the backward pass: agree on `.grad` of the attached weights, in place.

        A weight without a gradient counts as zero. True: the gradients are everyone's now and the
        optimizer is to apply them. False: the weights have been updated already.
        """

    def after_update(self) -> None:  # noqa: B027 - most exchange gradients, not weights
        """After the optimizer's step."""

    def before_evaluation(self) -> None:  # noqa: B027 - most have the same weights at any time
        """Before an evaluation or a checkpoint: give all nodes the same weights, in place."""

    def optimizer_state(
        self, named: Sequence[tuple[str, torch.Tensor]]
    ) -> dict[str, dict[str, Any]] | None:
        """Where the exchange itself holds the optimizer's state: that, by parameter; else None."""
        return None

    def memory(self) -> Memory:
        """What the node's next update depends on besides; the same names and sizes on all nodes."""
        return {}

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what is held outside the network."""


class Summing(Exchange):
    """An exchange that adds up gradients, bucket by bucket, under the backward pass."""

    def __init__(self, setting: ExchangeSetting) -> None:
        super().__init__(setting)
        self._buckets: Buckets | None = None

    @property
    def adds_up(self) -> bool:
        return self.setting.options.compression == "none"

    @abstractmethod
    def sum(self, flat: torch.Tensor, number: int) -> Waitable:
        """Begin to add up bucket `number`, a contiguous vector, over all nodes, in place."""

    def attach(self, weights: Sequence[torch.Tensor]) -> None:
        super().attach(weights)
        self._buckets = Buckets(
            self._weights,
            self._checked_sum,
            capacity=int(self.setting.options.bucket_mb * 2**20),
            overlap=self.setting.overlap and self.setting.options.overlap,
        )

    def _checked_sum(self, flat: torch.Tensor, number: int) -> Waitable:
        """Send nothing that would make every node's weights useless: who has it says so."""
        if not is_finite(flat):
            network = self.network
            raise DivergedError(
                f"node {network.rank} on {network.hosts[network.rank]} has a gradient in"
                f" {network.place} of which {bad_of(flat)} are not finite: {DIVERGED}"
            )
        return self.sum(flat, number)

    def finish(self) -> bool:
        assert self._buckets is not None
        self._buckets.finish()
        return True

    def close(self) -> None:
        if self._buckets is not None:
            self._buckets.close()
