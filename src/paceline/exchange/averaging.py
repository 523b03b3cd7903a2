"""`averaging` (local SGD): every node trains by itself, and now and then weights are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import DivergedError
from paceline.exchange.base import Exchange, ExchangeSetting
from paceline.exchange.buckets import divide
from paceline.exchange.network import Pending
from paceline.local.finite import is_finite
from paceline.local.shared import divided, memory_view


class Averaging(Exchange):
    """`exchange.every` updates on own samples, then the mean of all nodes' weights.

    A node's weights count by the samples it has seen since the last average, so with one update in
    between and plain SGD the average is exactly the synchronous update:

        sum of n_k/n (w - r g_k)  =  w - r (sum of n_k/n g_k)

    Momentum and Adam's moments stay each node's own. Before an evaluation or a checkpoint the
    weights are averaged too; the count of updates begins anew after every average.
    """

    name = "averaging"
    synchronous = False
    own_loss = True
    summary = "local SGD: `every` updates on own samples, then the mean of the weights by samples"

    def __init__(self, setting: ExchangeSetting) -> None:
        super().__init__(setting)
        self._blocks: list[list[torch.Tensor]] = []
        self._updates = 0
        self._samples = 0

    def attach(self, weights: Sequence[torch.Tensor]) -> None:
        super().attach(weights)
        self._blocks = divide(self._weights, int(self.setting.options.bucket_mb * 2**20))

    def before_update(self, samples: int) -> None:
        self._samples += samples

    def finish(self) -> bool:
        return True  # the gradient stays this node's own

    def after_update(self) -> None:
        self._updates += 1
        if self._updates >= self.setting.options.every:
            self._average()

    def before_evaluation(self) -> None:
        if self._updates > 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        """All nodes come here after the same update."""
        bad = [0.0] * self.network.size
        bad[self.network.rank] = float(
            # What a node without samples has does not count, be it infinite.
            self._samples > 0 and not all(map(is_finite, self._weights))
        )
        total, *bad = self.network.total([self._samples, *bad], "the count of samples")
        if named := [host for host, flag in zip(self.network.hosts, bad, strict=True) if flag]:
            raise DivergedError(
                f"the weights of {', '.join(named)} are no longer finite at {self.network.place},"
                " and were not averaged with the others': lower optimizer.learning_rate, or set"
                " optimizer.clip_norm"
            )
        part = self._samples / total
        under_way: list[tuple[list[torch.Tensor], torch.Tensor, Pending]] = []
        for block in self._blocks:
            flat = torch.cat([memory_view(weight, weight) for weight in block])
            if part > 0:
                flat.mul_(part)
            else:
                flat.zero_()
            under_way.append((block, flat, self.network.sum(flat, "the average of weights")))
        for block, flat, pending in under_way:
            pending.wait()
            for weight, mean in divided(flat, block):
                memory_view(weight, weight).copy_(mean)
        self._updates = self._samples = 0
