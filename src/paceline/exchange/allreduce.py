"""`allreduce`: every node gets the sum of all gradients, by the backend's own all-reduce."""

from __future__ import annotations

import torch

from paceline.exchange.base import Beginning, ExchangeSetting, Memory, Summing
from paceline.exchange.buckets import Waitable
from paceline.exchange.memory import errors_named, errors_of
from paceline.exchange.network import Pending


class AllReduce(Summing):
    """The backend's all-reduce on every bucket, under the backward pass.

    With `compression = "bf16"` the gradients travel in half the bytes; what rounding
    takes off is kept here and added to the next update's gradient (error feedback).
    """

    name = "allreduce"
    summary = "the backend's all-reduce, bucket by bucket under the backward pass"

    def __init__(self, setting: ExchangeSetting) -> None:
        super().__init__(setting)
        self._errors: dict[int, torch.Tensor] = {}

    def start(self, beginning: Beginning) -> int:
        if beginning.update and self.setting.options.compression == "bf16":
            assert self._buckets is not None
            self._errors = errors_of(self.setting.saved(), self._buckets)
        return beginning.update

    def memory(self) -> Memory:
        return errors_named(self._errors)

    def sum(self, flat: torch.Tensor, number: int) -> Waitable:
        if self.setting.options.compression == "bf16" and flat.dtype is torch.float32:
            return self._sum_bf16(flat, number)
        return self.network.sum(flat, "the sum of gradients")

    def _sum_bf16(self, flat: torch.Tensor, number: int) -> Waitable:
        kept = self._errors.get(number)
        if kept is not None:
            flat.add_(kept)
        small = flat.to(torch.bfloat16)
        self._errors[number] = flat - small
        return Widened(self.network.sum(small, "the sum of gradients (bf16)"), small, flat)


class Widened:
    """A sum in bf16, whose result goes back into fp32."""

    def __init__(self, pending: Pending, small: torch.Tensor, flat: torch.Tensor) -> None:
        self._pending, self._small, self._flat = pending, small, flat

    def wait(self) -> None:
        """Wait for the sum and put it where the gradient was."""
        self._pending.wait()
        self._flat.copy_(self._small)
