"""What strategies with several ranks have in common: weights, and an update, that all share."""

from __future__ import annotations

import torch
from torch import nn

from paceline.local.base import LocalStrategy, OptimizerState
from paceline.local.pieces import PieceUpdate
from paceline.local.shared import SharedModel


class SharedWeights(LocalStrategy):
    """A strategy whose ranks have one copy of the weights between them."""

    _shared: SharedModel

    @property
    def model(self) -> nn.Module:
        return self._shared.model

    def prepare_evaluation(self) -> None:
        self._shared.share_buffers(lambda name: 0)

    def spread_buffers(self) -> None:
        self._shared.share_buffers(lambda name: 0)

    def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        self._shared.load(tensors)


class PiecewiseOptimizer(SharedWeights):
    """A strategy in which every rank updates pieces of the shared weights (see `pieces`)."""

    _pieces: PieceUpdate

    def scale_rate(self, factor: float) -> None:
        self._pieces.scale_rate(factor)

    def optimizer_state(self) -> OptimizerState:
        return self._pieces.state()

    def load_optimizer_state(self, state: OptimizerState) -> None:
        self._pieces.load_state(state)

    def close(self) -> None:
        self._pieces.close()
