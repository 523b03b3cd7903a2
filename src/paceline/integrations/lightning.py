"""Lightning: `Trainer(strategy=SharesStrategy([3, 1]), use_distributed_sampler=False)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from paceline.backends import BACKEND_NAME, register_mpi
from paceline.errors import UnsupportedError
from paceline.integrations.shares import Shares, Weight

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    raise ImportError(
        "paceline.integrations.lightning needs the package lightning: pip install"
        " 'paceline[lightning]'"
    ) from None


class SharesStrategy(DDPStrategy):  # type: ignore[misc]
    """DDP in which every rank takes its share of each batch of the training DataLoader.

    The DataLoader is that of a training on one device: its batch is the global one, and its order
    is kept. Validation, testing and prediction see their loaders as Lightning gives them.
    """

    def __init__(
        self,
        shares: Sequence[float] | None = None,
        *,
        weight: Weight | None = None,
        exact: bool = True,
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        """As `Shares`; `process_group_backend="mpi4py"` is Paceline's MPI, under mpiexec."""
        super().__init__(process_group_backend=process_group_backend, **options)
        self._shares = Shares(shares, weight=weight, exact=exact)

    def setup_distributed(self) -> None:
        """Open the process group, over MPI where that is wanted."""
        if self._process_group_backend == BACKEND_NAME:
            register_mpi()
        super().setup_distributed()

    def configure_ddp(self) -> None:
        """Wrap the model, if its weights will be those of one process."""
        self._shares.check_model(self.model)
        super().configure_ddp()

    def process_dataloader(self, dataloader: object) -> object:
        """This rank's parts of the training batches."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader):
            raise UnsupportedError(
                f"training data of type {type(dataloader).__name__} cannot be divided by shares:"
                " give a torch DataLoader"
            )
        if isinstance(dataloader.sampler, DistributedSampler):
            raise UnsupportedError(
                "the training DataLoader has a DistributedSampler, which divides it already, and in"
                " another order than one process has: give Trainer use_distributed_sampler=False"
            )
        return self._shares.divide(dataloader)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Weigh the batch, and let the module compute."""
        self._shares.weigh(args[0], self.root_device)
        return super().training_step(*args, **kwargs)

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Scale the loss, so that DDP's mean is that over the global batch."""
        super().backward(self._shares.scale(closure_loss), optimizer, *args, **kwargs)
        return closure_loss
