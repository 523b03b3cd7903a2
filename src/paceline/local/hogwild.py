"""`hogwild`: P processes, one shared copy of the weights, no locks, no waiting."""

from __future__ import annotations

from paceline.data.samples import Samples
from paceline.errors import StrategyError
from paceline.local.base import Job, StepResult, gradients, prepare_model
from paceline.local.common import SharedWeights, WholeOptimizer, WorkerPerRank
from paceline.local.cores import set_threads
from paceline.local.shared import SharedModel


class Hogwild(WorkerPerRank, SharedWeights, WholeOptimizer):
    """Asynchronous: each process applies its own part's gradient as soon as it has it.

    A part's gradient is weighted with its samples over all samples, so that the
    updates of one global batch add up to one synchronous update, only from
    weights of different age. Every process has its own optimizer state; the
    first one's is saved. Runs do not repeat: never chosen unless asked for.
    """

    name = "hogwild"
    synchronous = False
    summary = "P processes update one shared copy without locks; asynchronous"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        set_threads(job.node.threads)
        self._shared = SharedModel(prepare_model(job), job)
        self._optimize(self._shared.model)

    def update(self, samples: Samples, total: int, step: int) -> StepResult:
        result = gradients(self.job, self.model, samples, total, step, self.worker)
        if result.counted != result.samples:
            raise StrategyError(
                "the step returns a weight, but processes of local.strategy = 'hogwild' update by"
                " themselves, and none knows the weight of the whole batch: use 'processes'"
            )
        if result.samples:
            self._apply(result, total)
        return result

    def prepare_evaluation(self) -> None:
        # Processes drift apart; here all have reached the same update.
        self._shared.board.barrier("hogwild")
        super().prepare_evaluation()
