"""`hogwild`: every node trains a copy of its own; copies are mixed without anybody waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import UnsupportedError
from paceline.exchange.base import Beginning, Exchange, ExchangeSetting
from paceline.exchange.gossip.copy import Mixture
from paceline.exchange.gossip.peers import Neighbours


class HogwildExchange(Exchange):
    """Distributed Hogwild: updates on own samples; two copies at a time move to their mean.

    After every `exchange.mix_every` updates a node sends its copy to another one, in turns. Both go
    towards each other by their shares, so that the mean over all copies stays where it was. The
    sending, and the answer, happen beside the training of both.
    """

    name = "hogwild"
    synchronous = False
    own_loss = True
    summary = "every node its own copy, mixed with the others' in turns without waiting"

    def __init__(self, setting: ExchangeSetting) -> None:
        super().__init__(setting)
        if not isinstance(setting.network, Neighbours):
            raise UnsupportedError(
                "exchange.kind = 'hogwild' needs nodes to mix with: train it on two hosts or more"
            )
        self.neighbours = setting.network
        self._update = 0

    def attach(self, weights: Sequence[torch.Tensor]) -> None:
        super().attach(weights)
        self._mixture = Mixture(self._weights)

    def start(self, beginning: Beginning) -> int:
        """All begin with the first node's weights, buffers, optimizer state and update."""
        update = self.neighbours.agree(beginning)
        self._update = update
        self._mixture.show(update)
        self.neighbours.begin(self._mixture)
        return update

    def finish(self) -> bool:
        return True  # the gradient stays this node's own

    def begin(self, *, update: int, rate: float, samples: int, total: int) -> None:
        self._update = update

    def after_update(self) -> None:
        self._mixture.show(self._update + 1)
        self.neighbours.updated()

    def before_evaluation(self) -> None:
        self._mixture.show(self._mixture.clock)
        mean = self.neighbours.mean_of_all(self._mixture)
        if mean is not None:
            self._mixture.become(mean)
