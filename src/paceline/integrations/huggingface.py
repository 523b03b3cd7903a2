"""Hugging Face: `SharesTrainer(..., shares=[3, 1])` in place of `Trainer(...)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.integrations.shares import Shares, Weight

try:
    from transformers import Trainer

    from paceline.integrations.accelerate import divide_prepared
except ImportError:
    raise ImportError(
        "paceline.integrations.huggingface needs the packages transformers and accelerate: pip"
        " install 'paceline[huggingface]'"
    ) from None


class SharesMixin:
    """For a Trainer of one's own: `class MyTrainer(SharesMixin, Trainer)`.

    The global batch is per_device_train_batch_size times the number of ranks, as ever; each rank
    takes its share of it.
    """

    def __init__(
        self,
        *args: Any,
        shares: Sequence[float] | None = None,
        weight: Weight | None = None,
        exact: bool = True,
        **options: Any,
    ) -> None:
        """As `Shares`, beside everything that `Trainer` takes."""
        super().__init__(*args, **options)
        self.shares = Shares(shares, weight=weight, exact=exact)

    def get_train_dataloader(self) -> Any:
        """This rank's parts of the global batches."""
        self.shares.check_model(self.model)  # type: ignore[attr-defined]
        found = super().get_train_dataloader()  # type: ignore[misc]
        return divide_prepared(found, self.shares, weighs=False)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Scale the loss of a training step, unless the Trainer has divided by all ranks' items."""
        trainer: Any = self
        divides = (
            trainer.args.average_tokens_across_devices
            and (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func)
            and num_items_in_batch is not None
        )
        scales = model.training and not return_outputs and not divides
        if scales:  # now: the Trainer has taken all batches of an update from the loader before
            self.shares.weigh(inputs, trainer.args.device)
        found = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        return self.shares.scale(found) if scales else found


class SharesTrainer(SharesMixin, Trainer):  # type: ignore[misc]
    """A Trainer in which every rank takes its share of each global batch."""
