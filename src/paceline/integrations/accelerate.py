"""Accelerate: `SharesAccelerator(shares=[3, 1])` in place of `Accelerator()`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from paceline.errors import UnsupportedError
from paceline.integrations.shares import Shares, Weight, with_batches

try:
    from accelerate import Accelerator
    from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
except ImportError:
    raise ImportError(
        "paceline.integrations.accelerate needs the package accelerate: pip install"
        " 'paceline[accelerate]'"
    ) from None


class SharesAccelerator(Accelerator):  # type: ignore[misc]
    """Divides training loaders by shares, and scales the loss accordingly.

    A loader that is divided goes through `prepare_training_loader`; all others go through `prepare`
    as ever: to gather what ranks found in an evaluation, their parts must be equal.
    """

    def __init__(
        self,
        *args: Any,
        shares: Sequence[float] | None = None,
        weight: Weight | None = None,
        exact: bool = True,
        **options: Any,
    ) -> None:
        """As `Shares`, beside everything that `Accelerator` takes."""
        super().__init__(*args, **options)
        self.shares = Shares(shares, weight=weight, exact=exact)

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Wrap the model, if its weights will be those of one process."""
        self.shares.check_model(model)
        return super().prepare_model(model, *args, **kwargs)

    def prepare_training_loader(self, loader: DataLoader[Any]) -> Any:
        """This rank's parts of the global batches, which are those that `prepare` would divide."""
        return divide_prepared(self.prepare_data_loader(loader), self.shares)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Of the loss of a batch of a divided loader, scaled; of others as it is."""
        super().backward(self.shares.scale(loss), **kwargs)


def divide_prepared(prepared: Any, shares: Shares, *, weighs: bool = True) -> Any:
    """Give each rank its share of the batches that a loader of Accelerate divides evenly.

    `weighs`: the loader weighs each batch when it hands it out.
    """
    if shares.ranks == 1:
        return prepared
    sharded = getattr(prepared, "batch_sampler", None)
    if not isinstance(prepared, DataLoaderShard) or not isinstance(sharded, BatchSamplerShard):
        raise UnsupportedError(
            f"a {type(prepared).__name__} of Accelerate with a {type(sharded).__name__} cannot be"
            " divided by shares: give a map-style data set, a batch_size and dispatch_batches=False"
        )
    inner = sharded.batch_sampler
    if type(inner) is not BatchSampler:
        raise UnsupportedError(
            f"batches of a {type(inner).__name__} cannot be divided by shares: give the DataLoader"
            " a batch_size and, where wanted, a sampler"
        )
    size = inner.batch_size * (1 if sharded.split_batches else shares.ranks)
    whole = BatchSampler(inner.sampler, size, inner.drop_last)
    plain = with_batches(prepared.base_dataloader, whole)
    prepared.base_dataloader = shares.divide(plain)
    return WeighedLoader(prepared, shares) if weighs else prepared


class WeighedLoader:
    """A loader of Accelerate that weighs each batch when it hands it out."""

    def __init__(self, prepared: Any, shares: Shares) -> None:
        self._prepared, self._shares = prepared, shares

    def __iter__(self) -> Iterator[Any]:
        return self._shares.batches(self._prepared)

    def __len__(self) -> int:
        return len(self._prepared)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prepared, name)
