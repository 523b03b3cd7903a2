"""Trials with parameter servers: the last hosts serve from a thread, the others compute."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path

from benchmarks.lab.trials import Trial
from paceline.config import config_from
from paceline.exchange.servers.client import Served
from paceline.run import RunDirectory
from paceline.schema import RankContext
from paceline.training.assemble import Task
from paceline.training.serving import serve


class ServingThread:
    """A server beside the bench: it ends when its workers say that they are done."""

    samples = 0

    def __init__(self, trial: Trial, context: RankContext) -> None:
        self._error: BaseException | None = None
        task = Task(
            config=config_from(dict(trial.settings)),
            plan=trial.plan,
            run=RunDirectory(Path(os.devnull)),
            context=context,
        )
        self._thread = threading.Thread(target=self._serve, args=(task,), name="paceline-server")
        self._thread.start()

    def _serve(self, task: Task) -> None:
        try:
            serve(task)
        except BaseException as error:
            self._error = error

    def step(self, update: int) -> None:
        """Serving goes on by itself."""

    def close(self) -> None:
        """Wait until every worker is done."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def served_context(context: RankContext, turn: int) -> RankContext:
    """A place where the nodes of one trial meet: a port of its own for each."""
    return dataclasses.replace(context, port=context.port + 1 + turn)


def join_servers(trial: Trial, context: RankContext) -> Served:
    """A worker's way to the servers."""
    config = config_from(dict(trial.settings))
    return Served(context, trial.plan, config.exchange, deadline=config.train.deadline)
