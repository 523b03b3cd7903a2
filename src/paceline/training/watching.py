"""What the loop needs to be observed: the recorder, the stall watch, the common clock."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from paceline.exchange.opening import open_watch_store
from paceline.observe.clock import MESSAGE_BYTES, offset_to_first
from paceline.observe.mailbox import BothPosts, FolderPosts, Posts, StorePosts
from paceline.observe.recorder import Recorder, board_listener, make_recorder
from paceline.observe.samples import process_began
from paceline.observe.stall import StallSettings, StallWatch, board_place
from paceline.schema import RankContext
from paceline.training.assemble import Task


@contextlib.contextmanager
def observed(task: Task) -> Iterator[Recorder]:
    """The recorder of this rank; its board and network report to it until the end."""
    with recording(task) as recorder, heard(task, recorder):
        yield recorder


@contextlib.contextmanager
def heard(task: Task, recorder: Recorder) -> Iterator[None]:
    """The board and network of this rank report to a recorder, and its stalls are watched."""
    with _watched(task, recorder):
        if recorder.enabled:
            _listen(task, recorder)
        try:
            yield
        finally:
            if task.board is not None:
                task.board.on_wait = None
            if task.network is not None:
                task.network.on_wait = None


def recording(task: Task, *, role: Literal["worker", "server"] = "worker") -> Recorder:
    """The recorder of this rank, to be closed by whoever opens it."""
    settings, context = task.config.observe, _recorded_as(task)
    own_process = task.process_is_new and (context.world_size > 1 or _started_by_launcher())
    if own_process:
        atexit.register(_end_quickly)
    return make_recorder(
        task.run.rank(context.rank),
        context,
        events=settings.events,
        samples_every=settings.samples_every,
        # Where a rank has a process to itself, its imports are start-up.
        began=process_began() if own_process else None,
        role=role,
        host=_name_in_plan(task),
        say=task.view.say,
    )


def _name_in_plan(task: Task) -> str | None:
    """What the plan calls this rank's host; two of its hosts may be names of one machine."""
    names = [node.host for node in task.plan.nodes]
    place = task.context.node
    return names[place] if len(set(names)) > 1 and place < len(names) else None


def _recorded_as(task: Task) -> RankContext:
    """This rank's place among all ranks of the run."""
    before, context = task.ranks_before, task.context
    return replace(context, rank=context.rank + before, world_size=context.world_size + before)


def _listen(task: Task, recorder: Recorder) -> None:
    _measure_clock(task, recorder)
    if task.board is not None:
        task.board.on_wait = board_listener(recorder, _recorded_as(task))
    if task.network is not None:
        task.network.on_wait = lambda operation, started, seconds: recorder.add(
            "exchange", started, seconds, detail=operation
        )


def _measure_clock(task: Task, recorder: Recorder) -> None:
    """Every node's offset to the first, measured by its leader.

    Not where nodes come and go: their connections carry no such messages.
    """
    if task.context.nodes == 1 or task.plan.exchange in ("parameter_server", "hogwild"):
        return
    found = [0.0, 0.0]
    if (network := task.network) is not None:

        def send(peer: int, data: bytes) -> None:
            network.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), peer).wait()

        def receive(peer: int) -> bytes:
            data = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
            network.receive(data, peer).wait()
            return data.numpy().tobytes()

        nodes = list(range(network.size))
        offset = offset_to_first(network.rank, nodes, send, receive, now=recorder.now)
        found = [offset.seconds, offset.uncertainty]
    if task.board is not None:
        found = task.board.sum(found, "clock")
    if task.context.node > 0:
        recorder.clock(*found)


@contextlib.contextmanager
def _watched(task: Task, recorder: Recorder) -> Iterator[None]:
    if task.context.world_size == 1 or task.board is None:
        yield
        return
    settings = StallSettings(deadline=task.config.train.deadline)
    with _posts(task) as posts:
        watch = StallWatch(
            task.context,
            posts,
            place=board_place(task.board),
            recorder=recorder,
            settings=settings,
            # Only the first rank has a view, and it may be the one that is missing.
            say=task.view.say if task.context.is_first else partial(print, flush=True),
        )
        with watch:
            yield


@contextlib.contextmanager
def _posts(task: Task) -> Iterator[Posts]:
    """Where ranks leave word: in the run directory, and among nodes in a store as well."""
    folder = FolderPosts(task.run.path)
    if task.context.nodes == 1:
        yield folder
        return
    deadline = task.config.train.deadline
    serves = False if task.in_legs else None
    store = StorePosts(lambda: open_watch_store(task.context, deadline=deadline, serves=serves))
    try:
        yield BothPosts(folder, store)
    finally:
        store.close()


def _started_by_launcher() -> bool:
    """This process runs one of the launchers' programs: it was started for this rank alone."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith(("paceline.launch.", "paceline.workflow."))


def _end_quickly() -> None:
    """Leave the interpreter without looking for garbage: with torch that took up to a second."""
    gc.freeze()
    gc.disable()
