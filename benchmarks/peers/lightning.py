"""PyTorch Lightning: a LightningModule and a Trainer with the strategy "ddp" on CPUs.

    python -m benchmarks.peers.lightning CONFIG --result FILE [--processes N] [--threads N]

Started by torchrun, which its guide names for several machines. Its own sampler is off, so that all
train on the batches of CONFIG; so are logger, checkpoints and progress bar.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.peers import common, training


def main() -> None:
    request = common.read_request(__doc__)
    common.require("lightning")
    if request.worker:
        train(request)
    else:
        sys.exit(training.torchrun("benchmarks.peers.lightning", request))


def train(request: common.Request) -> None:
    """One rank."""
    import lightning  # type: ignore[import-not-found,unused-ignore]

    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    job = training.open_job(request, rank=rank, world=world, place=int(os.environ["LOCAL_RANK"]))
    clock = common.Clock()

    class Module(lightning.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.network = job.model

        def training_step(self, batch: Any, number: int) -> Any:
            inputs, targets = batch
            return job.parts.loss(self.network(inputs), targets)

        def configure_optimizers(self) -> Any:
            return job.optimizer

    class Watch(lightning.Callback):  # type: ignore[misc,unused-ignore]
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            training.set_epoch(job.loader, trainer.current_epoch)
            clock.start()

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int
        ) -> None:
            clock.losses.append(float(outputs["loss"]))
            clock.update()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            clock.epoch(job.batch * len(clock.updates))

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=request.processes,
        num_nodes=max(1, len(common.lab_hosts())),
        strategy="ddp" if world > 1 else "auto",
        max_epochs=job.config.train.epochs,
        max_steps=job.config.train.steps or -1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch()],
    )
    meter = training.Meter()
    trainer.fit(Module(), job.loader)
    version = {"version": lightning.__version__}
    training.finish(job, clock, meter, training.all_reduce, lambda: version)
    training.leave_group()


if __name__ == "__main__":
    main()
