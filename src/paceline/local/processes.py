"""`processes`: P ranks x T threads, each on its part of the batch, on cores of its own."""

from __future__ import annotations

import contextlib

from paceline.data.samples import Samples
from paceline.errors import StrategyError
from paceline.local.base import Job, StepResult, gradients, prepare_model
from paceline.local.batch_norm import whole_batch
from paceline.local.common import PiecewiseOptimizer, WorkerPerRank
from paceline.local.cores import set_threads
from paceline.local.gradient_hooks import GradientHooks
from paceline.local.pieces import PieceUpdate
from paceline.local.rounded import RoundedWeights, can_round
from paceline.local.shared import SharedModel


class Processes(WorkerPerRank, PiecewiseOptimizer):
    """Data parallel on one node, the weights shared, gradients summed in shared memory.

    Every rank updates its own piece of the weights (see `pieces`). Dropout draws
    different numbers on each rank.
    """

    name = "processes"
    summary = "P processes x T threads, gradients summed in shared memory"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if not job.elementwise:
            raise StrategyError(
                "the optimizer does something else to pieces of parameters than to whole ones"
                " (tried), and shared memory divides them: set local.sync = 'ddp', or use"
                " local.strategy = 'threads'"
            )
        set_threads(job.node.threads)
        self._shared = SharedModel(prepare_model(job), job, rounded=can_round(job))
        trained = [n for n, p in self._shared.parameters.items() if p.requires_grad]
        self._rounded = RoundedWeights(self._shared, trained) if can_round(job) else None
        self._pieces = PieceUpdate(
            self._shared,
            job,
            names=trained,
            group=range(self._shared.board.ranks),
            hooks=GradientHooks(self._shared.parameters),
            rounded=self._rounded,
        )
        self._pieces.publish_while_computing()
        ranks = range(self._shared.board.ranks)
        self._whole = whole_batch(job, self._shared.model, group=ranks)

    def update(self, samples: Samples, total: int, step: int) -> StepResult:
        self._pieces.round_weights()
        with contextlib.nullcontext() if self._rounded is None else self._rounded.in_use():
            result = gradients(self.job, self.model, samples, total, step, self.worker, self._whole)
        self._pieces.step(result, total)
        return result
