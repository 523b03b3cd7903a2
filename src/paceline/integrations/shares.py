"""Every rank a part of each global batch in proportion to its share, and gradients that add up.

DDP divides the sum of the ranks' gradients by their number, which is the gradient of the global
batch only where all parts are equal. With own weight w (the samples of a part) and W = the sum of
all ranks' w, each rank scales its mean loss by ranks * w / W: DDP's mean is then the gradient of
the mean over the global batch, as of one process, also under gradient accumulation and `no_sync`.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from paceline.config.environment import given_shares
from paceline.data.sampler import apportion
from paceline.errors import ConfigError, DataError, UnsupportedError, shown

Weight = Callable[[Any], float]
"""Of a batch: what its loss is the mean over, such as samples or tokens."""


class Shares:
    """The shares of all ranks, and the weight of the batch that this rank is working on.

    In a loop of plain DDP, with the loader that one process would have:

        shares = Shares([3, 1])
        for batch in shares.batches(shares.divide(loader)):
            loss = shares.scale(mean_loss(model, batch))
            loss.backward()
    """

    def __init__(
        self,
        shares: Sequence[float] | None = None,
        *,
        weight: Weight | None = None,
        exact: bool = True,
    ) -> None:
        """`shares`: one number per rank; as `paceline run` found them in hosts.toml, or equal.

        `weight`: of a batch; its samples without it. `exact`: refuse models whose results depend
        on how batches are divided.
        """
        self._given = shares
        self._weight = weight or samples_in
        self._exact = exact
        self._own: float | None = None
        self._total: torch.Tensor | None = None
        self._sum: Any = None

    @property
    def ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def numbers(self) -> list[float]:
        """The share of every rank."""
        if self.ranks == 1:  # started alone: everything is its share
            return [1.0]
        given = self._given if self._given is not None else given_shares()
        found = [float(share) for share in given] if given else [1.0] * self.ranks
        if len(found) != self.ranks:
            raise ConfigError(
                f"shares {shown(found)} are {len(found)}, but there are {self.ranks} ranks"
            )
        if not all(0 < share < float("inf") for share in found):
            raise ConfigError(f"shares {shown(found)} must all be above 0: leave such ranks out")
        return found

    def check_model(self, model: nn.Module) -> None:
        """Refuse what would not give the weights of one process."""
        if not self._exact or self.ranks == 1:
            return
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                raise UnsupportedError(
                    f"layer {name!r} is a {type(module).__name__}, which computes with the"
                    " statistics of each rank's part alone: use SyncBatchNorm on CUDA, another"
                    " normalisation, or exact=False to have it so"
                )

    # --- what each rank gets --------------------------------------------------

    def divide(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The loader of this rank's parts of what a loader of one process gives."""
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            raise UnsupportedError(
                "a stream, or a DataLoader with batch_size=None, has no batches that could be"
                " divided: give a map-style data set and a batch_size"
            )
        parts = PartSampler(loader.batch_sampler, self.numbers(), self.rank)
        return with_batches(loader, parts)

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of a loader, each weighed before it is worked on."""
        try:
            for batch in loader:
                self.weigh(batch)
                yield batch
        finally:
            self.forget()

    # --- what makes it exact --------------------------------------------------

    def weigh(self, batch: Any, device: torch.device | None = None) -> None:
        """Begin to work on a batch: its weight is summed over ranks while the model computes."""
        self._own = float(self._weight(batch))
        if not 0 <= self._own < float("inf"):
            raise DataError(f"the weight of a batch is {self._own}, but must be a number from 0")
        if self.ranks > 1:
            self._total = torch.tensor([self._own], dtype=torch.float64, device=device)
            self._sum = dist.all_reduce(self._total, async_op=True)

    def forget(self) -> None:
        """No batch is worked on any more."""
        self._settle()
        self._own = self._total = None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss whose gradients DDP averages to that of the global batch."""
        factor = self.factor()
        return loss if factor == 1.0 else loss * factor

    def factor(self) -> float:
        """ranks * own weight / weight of all; 1 where no batch of ours is worked on."""
        self._settle()
        if self._own is None or self._total is None:
            return 1.0
        total = float(self._total)
        if total <= 0:
            raise DataError("a global batch has weight 0: there is nothing to take the mean over")
        return self.ranks * self._own / total

    def _settle(self) -> None:
        if self._sum is not None:
            self._sum.wait()
            self._sum = None


class PartSampler(Sampler[list[int]]):
    """This rank's part of every batch of another sampler of batches."""

    def __init__(self, whole: Any, shares: Sequence[float], rank: int) -> None:
        self.whole, self.shares, self._rank = whole, list(shares), rank
        self.sizes: list[tuple[int, int]] = []
        """Of the newest epoch that was begun: samples of this rank's part and of the batch."""

    @property
    def sampler(self) -> Any:
        """Of the samples: frameworks tell it the epoch."""
        return getattr(self.whole, "sampler", self.whole)

    @property
    def batch_size(self) -> Any:
        return getattr(self.whole, "batch_size", None)

    @property
    def drop_last(self) -> bool:
        return bool(getattr(self.whole, "drop_last", False))

    def set_epoch(self, epoch: int) -> None:
        """Tell whoever shuffles."""
        for each in (self.whole, self.sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[list[int]]:
        # As one process: a sampler's own __iter__ is called before a DataLoader draws its seed.
        return self._parts(self.begun())

    def _parts(self, begun: Iterator[Any] | None) -> Iterator[list[int]]:
        order = self.drawn(begun)
        spans = [span_of(len(batch), self.shares, self._rank) for batch in order]
        self.sizes = [
            (end - begin, len(batch)) for batch, (begin, end) in zip(order, spans, strict=True)
        ]
        for batch, (begin, end) in zip(order, spans, strict=True):
            yield batch[begin:end]

    def begun(self) -> Iterator[Any] | None:
        """The sampler's iterator; None where its random numbers are ours to draw, later."""
        sampler = self.sampler
        draws = isinstance(sampler, RandomSampler) and sampler.generator is None
        return None if draws else iter(self.whole)

    def drawn(self, begun: Iterator[Any] | None) -> list[list[Any]]:
        """All batches of the epoch, the same on every rank; every rank calls it."""
        order = self._all_of(begun) if begun is not None else self._shuffled()
        _check_same(order)
        return order

    def _all_of(self, begun: Iterator[Any]) -> list[list[Any]]:
        try:
            length = len(self.whole)
        except TypeError:
            raise UnsupportedError(
                f"the batch_sampler {type(self.whole).__name__} has no length, so ranks cannot"
                " agree on the batches of an epoch before it: give it a __len__"
            ) from None
        found = [list(batch) for batch in itertools.islice(begun, length + 1)]
        if len(found) > length:
            raise DataError(
                f"the sampler {type(self.whole).__name__} gives more batches than its length of"
                f" {length}: make both the same, which is an epoch"
            )
        return found

    def _shuffled(self) -> list[list[Any]]:
        """As it does itself with the global generator; that of the first rank counts."""
        seed = torch.empty((), dtype=torch.int64).random_()
        if dist.is_initialized():
            dist.broadcast(seed, 0)
        self.sampler.generator = torch.Generator().manual_seed(int(seed))
        try:
            return [list(batch) for batch in self.whole]
        finally:
            self.sampler.generator = None


def span_of(count: int, shares: Sequence[float], rank: int) -> tuple[int, int]:
    """Where a rank's part of so many samples begins and ends.

    >>> span_of(10, [3, 1], 1)
    (8, 10)
    """
    parts = _parts(count, shares)
    begin = sum(parts[:rank])
    return begin, begin + parts[rank]


def _parts(count: int, shares: Sequence[float]) -> list[int]:
    """Samples of every rank: in proportion to the shares, and none without.

    >>> _parts(10, [3, 1]), _parts(4, [100, 1, 1])
    ([8, 2], [2, 1, 1])
    """
    if count < len(shares):
        raise DataError(
            f"a batch of {count} cannot be divided among {len(shares)} ranks: set drop_last=True on"
            " the DataLoader, or choose a batch_size that leaves no such rest"
        )
    parts = apportion(count, shares)
    if 0 in parts:  # one for each; the rest in proportion
        parts = [1 + part for part in apportion(count - len(shares), shares)]
    return parts


def _check_same(order: list[list[int]]) -> None:
    """Refuse ranks that would take parts of different batches."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digest = hashlib.sha256()
    for batch in order:
        try:
            content = array("q", [len(batch), *batch]).tobytes()
        except (TypeError, OverflowError):  # samples may have names
            content = repr(batch).encode()
        digest.update(content)
    mine = torch.frombuffer(bytearray(digest.digest()[:8]), dtype=torch.int64)
    bounds = torch.stack([mine, -mine])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    if int(bounds[0]) != -int(bounds[1]):
        raise DataError(
            "the ranks draw their samples in different orders: give the sampler a torch.Generator"
            " with the same seed on every rank"
        )


def with_batches(loader: DataLoader[Any], batches: Sampler[list[int]]) -> DataLoader[Any]:
    """A copy of a loader, of whatever class, with another sampler of batches."""
    found = copy.copy(loader)
    # Not by assignment, which a DataLoader refuses.
    found.__dict__.update(batch_sampler=batches, _iterator=None)
    return found


def samples_in(batch: Any) -> float:
    """Samples of a batch: the length of its first tensor.

    >>> samples_in({"input_ids": torch.zeros(5, 7), "labels": torch.zeros(5)})
    5.0
    """
    found = next(tensors_in(batch), None)
    if found is None or found.dim() == 0:
        raise DataError(
            f"a batch of type {type(batch).__name__} has no tensor whose length is its number of"
            " samples: give weight=, a function of the batch"
        )
    return float(len(found))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those of a batch or a sample, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
