"""`allreduce` with `compression = "powersgd"`: gradients travel as thin matrices.

The algorithm is torch's own communication hook for DDP, with error feedback and warm start. It is
called on our buckets instead of DDP's: so a node may have any share, none included, and the
sums of two buckets cannot mix, as they can where the hook's callbacks run on Gloo's threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    _should_compress,
    powerSGD_hook,
)

from paceline.errors import UnsupportedError
from paceline.exchange.base import Beginning, ExchangeSetting, Memory
from paceline.exchange.memory import errors_named, errors_of
from paceline.exchange.network import Network
from paceline.exchange.turns import InTurn

SMALLER = 2
"""By how much thin matrices must be smaller than the whole one, to travel in its place."""
FULL_UPDATES = 10
"""The first updates travel whole: compressing the steepest gradients leads training astray."""


class PowerSGD(InTurn):
    """Each gradient matrix as the product of two thin ones of rank `exchange.rank`.

    What the approximation takes off is kept and added to the next update's gradient. Vectors, and
    matrices that would hardly shrink, travel whole.
    """

    name = "allreduce"
    synchronous = False  # all nodes have the same weights, but not those of one process
    summary = "all-reduce of low-rank approximations, with error feedback"

    def __init__(self, setting: ExchangeSetting) -> None:
        super().__init__(setting)
        if not setting.overlap:
            raise UnsupportedError(
                "exchange.compression = 'powersgd' needs nodes of one rank, which see whole"
                " matrices: use local.strategy = 'threads' or 'replicas', or compression = 'bf16'"
            )
        self._state = PowerSGDState(
            process_group=HookGroup(self.network),
            matrix_approximation_rank=setting.options.rank,
            start_powerSGD_iter=FULL_UPDATES,
            min_compression_rate=SMALLER,
            # A layer whose gradient is zero everywhere would be divided by its norm.
            orthogonalization_epsilon=1e-8,
        )

    def start(self, beginning: Beginning) -> int:
        saved = self.setting.saved() if beginning.update else {}
        if "updates" in saved and self._buckets is not None:
            state: Any = self._state
            state.error_dict = errors_of(saved, self._buckets)
            # Without all of them training would begin anew: with whole gradients.
            whole = int(saved["updates"]) < FULL_UPDATES
            if whole or len(state.error_dict) == len(self._buckets.groups):
                state.iter = int(saved["updates"])
            for number in state.error_dict:
                state.q_memory_dict[number] = saved[f"queries-{number}"].clone()
                state.p_memory_dict[number] = torch.empty(int(saved[f"rows-{number}"]))
        return beginning.update

    def memory(self) -> Memory:
        state: Any = self._state
        found = errors_named(state.error_dict) | {"updates": torch.tensor(state.iter)}
        for number in state.error_dict:
            found[f"queries-{number}"] = state.q_memory_dict[number]
            # What the other factor holds is computed anew at each update: its size is enough.
            found[f"rows-{number}"] = torch.tensor(len(state.p_memory_dict[number]))
        return found

    def carry_out(self, flat: torch.Tensor, number: int) -> None:
        assert self._buckets is not None
        groups = self._buckets.groups
        bucket: Any = HookBucket(flat, number, groups[number], last=number == len(groups) - 1)
        queries = self._state.q_memory_dict.get(number)
        if queries is not None:
            self._revive(queries, groups[number])
        powerSGD_hook(self._state, bucket).wait()
        flat.mul_(self.network.size)  # the hook takes the mean; our parts are weighted already

    def _revive(self, queries: torch.Tensor, weights: list[torch.Tensor]) -> None:
        at = 0
        for place, weight in enumerate(weights):
            if found := thin(weight, self.setting.options.rank):
                _, columns, rank = found
                revive(queries[at : at + columns * rank].view(columns, rank), place)
                at += columns * rank


def thin(weight: torch.Tensor, most: int) -> tuple[int, int, int] | None:
    """Rows, columns and rank of the matrix that a gradient travels as; None: it travels whole."""
    if weight.dim() < 2 or not weight.numel():
        return None
    rows = weight.shape[0]
    columns = weight.numel() // rows
    rank = min(rows, columns, most)
    found: Any = _should_compress(rows, columns, rank, SMALLER)  # type: ignore[no-untyped-call]
    return (rows, columns, rank) if found[0] else None


def revive(queries: torch.Tensor, seed: int) -> None:
    """Draw directions anew that are zero, the same on every node, in place.

    A layer that no sample reached in one update would else have a sum of zero ever after.
    """
    gone = ~queries.any(dim=0)
    if gone.any():
        # Not torch's generator, which belongs to the computation that goes on meanwhile.
        generator = torch.Generator().manual_seed(seed)
        fresh = torch.randn(queries.shape, generator=generator, dtype=queries.dtype)
        queries[:, gone] = fresh[:, gone]


class HookBucket:
    """One of our buckets as the hook sees DDP's."""

    def __init__(
        self, flat: torch.Tensor, number: int, weights: list[torch.Tensor], *, last: bool
    ) -> None:
        self._flat, self._number, self._weights, self._last = flat, number, weights, last

    def buffer(self) -> torch.Tensor:
        return self._flat

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._last

    def gradients(self) -> list[torch.Tensor]:
        # In memory the first dimension comes first in channels_last too: rows stay rows.
        parts = torch.split(self._flat, [weight.numel() for weight in self._weights])
        return [
            part.view(weight.shape[0], -1) if weight.dim() > 1 else part
            for part, weight in zip(parts, self._weights, strict=True)
        ]


class HookGroup:
    """The network as the hook sees a process group: counted, and each sum over when it returns."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def size(self) -> int:
        return self._network.size

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> _Done:
        if tensors[0].numel():
            self._network.sum(tensors[0], "the sum of gradients (PowerSGD)").settle()
        return _Done(tensors)


class _Done:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future
