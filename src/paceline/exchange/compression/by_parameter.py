"""Compressed sums of gradients whose buckets change from one backward pass to the next.

What compressing takes off is kept by parameter, and added to that parameter's next gradient in
whatever bucket it leaves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)

from paceline.exchange.allreduce import Widened
from paceline.exchange.base import Memory
from paceline.exchange.buckets import Waitable
from paceline.exchange.compression.powersgd import (
    FULL_UPDATES,
    SMALLER,
    HookBucket,
    HookGroup,
    revive,
    thin,
)
from paceline.exchange.memory import errors_named, numbered
from paceline.exchange.network import Network
from paceline.schema import ExchangeSettings

Members = Sequence[tuple[int, torch.Tensor]]
"""The parameters of a bucket by number, in their order in its vector."""


class ByParameter(ABC):
    """One node's part of sums whose vectors travel in fewer bytes."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._errors: dict[int, torch.Tensor] = {}

    @abstractmethod
    def begin(self, flat: torch.Tensor, members: Members) -> Waitable:
        """Begin to add up a vector of float32 over all nodes, in place."""

    def give_back(self, number: int, total: torch.Tensor) -> None:
        """A sum that nobody needed, of errors alone: one node is to send it again."""
        if number in self._errors:
            self._errors[number].add_(total.reshape(-1))

    def memory(self) -> Memory:
        """What the next update depends on: the same names and sizes on every node."""
        return errors_named(self._errors)

    def restore(self, saved: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """What `memory` had in a checkpoint; nothing of it where parameters have other sizes."""
        self._errors = numbered(saved, "error", [each.numel() for each in parameters])

    def _places(self, flat: torch.Tensor, members: Members) -> Iterator[tuple[int, torch.Tensor]]:
        at = 0
        for number, each in members:
            yield number, flat[at : at + each.numel()]
            at += each.numel()

    def _error(self, number: int, like: torch.Tensor) -> torch.Tensor:
        if number not in self._errors:
            self._errors[number] = torch.zeros_like(like)
        return self._errors[number]


class Rounded(ByParameter):
    """In bf16: half of the bytes."""

    def begin(self, flat: torch.Tensor, members: Members) -> Waitable:
        places = list(self._places(flat, members))
        for number, place in places:
            place.add_(self._error(number, place))
        small = flat.to(torch.bfloat16)
        for (number, place), (_, rounded) in zip(places, self._places(small, members), strict=True):
            torch.sub(place, rounded, out=self._errors[number])
        pending = self._network.sum(small, "the sum of gradients (bf16)")
        return Widened(pending, small, flat)


class LowRank(ByParameter):
    """Matrices as products of two thin ones, by torch's own hook (see `powersgd`).

    The hook keeps what it needs by bucket; before every call it is given what the bucket's
    parameters have, and that is taken back afterwards.
    """

    def __init__(self, network: Network, rank: int, updates: Callable[[], int]) -> None:
        """`updates`: how many the training has done."""
        super().__init__(network)
        self._updates, self._rank = updates, rank
        self._began: int | None = None
        """The update since which all errors are known; those after it travel whole."""
        self._queries: dict[int, torch.Tensor] = {}
        self._state: Any = PowerSGDState(
            process_group=HookGroup(network),
            matrix_approximation_rank=rank,
            start_powerSGD_iter=FULL_UPDATES,
            min_compression_rate=SMALLER,
            orthogonalization_epsilon=1e-8,
        )
        self._state.iter = FULL_UPDATES  # which updates travel whole is decided here

    def memory(self) -> Memory:
        queries = {f"queries-{number}": each for number, each in self._queries.items()}
        began = {} if self._began is None else {"began": torch.tensor(self._began)}
        return super().memory() | queries | began

    def restore(self, saved: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        super().restore(saved, parameters)
        if "began" not in saved:
            return
        self._began = int(saved["began"])
        sizes = [thin(each, self._rank) or (0, 0, 0) for each in parameters]
        numbers = [columns * rank for _, columns, rank in sizes]
        self._queries = numbered(saved, "queries", numbers)

    def begin(self, flat: torch.Tensor, members: Members) -> Waitable:
        if self._began is None:
            self._began = self._updates()
        if self._updates() - self._began < FULL_UPDATES:
            return self._network.sum(flat, "the sum of gradients")
        small = [(n, found) for n, each in members if (found := thin(each, self._rank))]
        if not small:
            return self._network.sum(flat, "the sum of gradients")
        state, places = self._state, list(self._places(flat, members))
        state.error_dict[0] = torch.cat([self._error(*place) for place in places])
        state.q_memory_dict[0] = torch.cat([self._query(number, *size) for number, size in small])
        state.p_memory_dict[0] = flat.new_empty(sum(rows * rank for _, (rows, _, rank) in small))
        bucket: Any = HookBucket(flat, 0, [each for _, each in members], last=True)
        powerSGD_hook(state, bucket).wait()
        flat.mul_(self._network.size)  # the hook takes the mean; our parts are weighted already
        for number, error in self._places(state.error_dict.pop(0), members):
            self._errors[number].copy_(error)
        sizes = [columns * rank for _, (_, columns, rank) in small]
        for (number, _), query in zip(small, state.q_memory_dict.pop(0).split(sizes), strict=True):
            self._queries[number] = query.clone()
        return _ENDED

    def _query(self, number: int, _: int, columns: int, rank: int) -> torch.Tensor:
        """What a matrix is multiplied with: what came of the update before."""
        found = self._queries.setdefault(number, torch.zeros(columns * rank))
        revive(found.view(columns, rank), number)
        return found


class _Ended:
    def wait(self) -> None:
        """Nothing is left to wait for."""


_ENDED = _Ended()


def by_parameter(
    settings: ExchangeSettings, network: Network, updates: Callable[[], int]
) -> ByParameter:
    """As the settings name it."""
    if settings.compression == "bf16":
        return Rounded(network)
    return LowRank(network, settings.rank, updates)
