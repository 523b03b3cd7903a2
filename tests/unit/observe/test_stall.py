"""The stall watch: who is missing, what it is doing and since when, in real barriers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.local.board import Board, anonymous_memory
from paceline.observe.mailbox import BothPosts, FolderPosts, StorePosts
from paceline.observe.recorder import make_recorder
from paceline.observe.stall import (
    FRAMES_THAT_WAIT,
    RankProgress,
    StallSettings,
    StallWatch,
    board_place,
    waits_in,
)
from paceline.schema import RankContext
from paceline.schema.events import read_sessions

FAST = StallSettings(deadline=0.6, least=0.1, tick=0.05)
PATIENCE = 20.0


@contextmanager
def board_memory() -> Iterator[int]:
    descriptor = anonymous_memory("board")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class World:
    """Ranks as threads, each with a board and a watch of its own."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.said: list[str] = []
        self.release = threading.Event()
        self.failures: list[BaseException] = []

    def run(self, act: Callable[[int, Board, StallWatch], None], until: int = 1) -> None:
        """Let every rank act; release those that stand still once `until` texts were said."""
        with board_memory() as descriptor:

            def rank_main(rank: int) -> None:
                context = RankContext(
                    rank=rank, world_size=self.ranks, local_rank=rank, local_size=self.ranks
                )
                board = Board(descriptor, ranks=self.ranks, rank=rank, deadline=PATIENCE)
                recorder = make_recorder(self.folder / f"rank-{rank}", context, samples_every=0)
                watch = StallWatch(
                    context,
                    FolderPosts(self.folder),
                    place=board_place(board),
                    recorder=recorder,
                    settings=FAST,
                    say=self.said.append,
                )
                with recorder, watch:
                    try:
                        act(rank, board, watch)
                    except BaseException as error:
                        self.failures.append(error)

            threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(self.ranks)]
            for thread in threads:
                thread.start()
            end = time.monotonic() + PATIENCE
            while len(self.said) < until and time.monotonic() < end:
                time.sleep(0.02)
            self.release.set()
            for thread in threads:
                thread.join()
        if self.failures:
            raise self.failures[0]

    def notes(self, rank: int) -> list[Any]:
        (session,) = read_sessions(self.folder / f"rank-{rank}" / "events.jsonl")
        return list(session.notes)


def until_taken_back(watch: StallWatch) -> None:
    """Wait for the watch to see that its rank went on."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if (watch.posts.read(watch.context.rank) or {}).get("state") is None:
            return
        time.sleep(0.02)
    raise AssertionError("the watch has not seen that its rank went on")


def updates(board: Board, count: int) -> None:
    for update in range(count):
        board.enter("update", update)
        time.sleep(0.06)
        board.enter("summing gradients")
        board.barrier("gradients")


def test_the_missing_rank_is_named_with_its_stack_and_place(tmp_path: Path) -> None:
    world = World(tmp_path, 3)

    def lost_in_thought() -> None:
        world.release.wait(PATIENCE)

    def act(rank: int, board: Board, watch: StallWatch) -> None:
        updates(board, 2)
        board.enter("update", 2)
        if rank == 1:
            lost_in_thought()
        board.enter("summing gradients")
        board.barrier("gradients")
        board.enter("update", 3)
        until_taken_back(watch)

    world.run(act)
    text = world.said[0]
    assert text.startswith("stall: ranks 0 and 2 have waited ")
    assert "in 'gradients' of update 2" in text
    assert "  rank 1 on host " in text
    assert "which is in 'update' of update 2 since " in text
    assert "lost_in_thought" in text
    assert "train.deadline" in text
    stall, over = world.notes(0)
    assert (stall.what, stall.ranks, stall.text) == ("stall", (1,), text)
    assert over.what == "stall over"
    assert world.notes(1) == []
    assert FolderPosts(tmp_path).read(1)["state"] is None  # type: ignore[index]


def test_all_have_arrived_and_nothing_goes_on(tmp_path: Path) -> None:
    """As with a cut network: both ranks are inside the exchange."""
    world = World(tmp_path, 2)

    def act(rank: int, board: Board, watch: StallWatch) -> None:
        board.enter("update", 5)
        with watch.waiting("allreduce"):
            world.release.wait(PATIENCE)

    world.run(act)
    assert world.said[0].startswith("stall: ranks 0 and 1 have waited ")
    assert "in 'allreduce' of update 5" in world.said[0]
    assert "the network is cut or stuck" in world.said[0]
    assert world.notes(0)[0].ranks == ()


def test_the_first_of_those_who_wait_speaks_once(tmp_path: Path) -> None:
    world = World(tmp_path, 3)

    def act(rank: int, board: Board, watch: StallWatch) -> None:
        board.enter("update", 0)
        if rank == 0:
            world.release.wait(PATIENCE)
        board.barrier("gradients")

    world.run(act)
    assert len(world.said) == 1
    assert world.said[0].startswith("stall: ranks 1 and 2 have waited ")


def test_ranks_that_work_and_do_not_wait_are_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path, 2)

    def act(rank: int, board: Board, watch: StallWatch) -> None:
        board.enter("evaluate", 4)
        time.sleep(0.8)
        world.said.append("done")

    world.run(act)
    assert set(world.said) == {"done"}
    assert world.notes(0) == []


RANK = """
import os, psutil, signal, sys, time
from pathlib import Path
from paceline.local.board import Board
from paceline.observe.mailbox import FolderPosts
from paceline.observe.stall import StallSettings, StallWatch, board_place
from paceline.schema import RankContext
descriptor, rank, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
is_stopped = lambda text: psutil.Process(int(text)).status() == psutil.STATUS_STOPPED
board = Board(descriptor, ranks=2, rank=rank, deadline=20.0)
context = RankContext(rank=rank, world_size=2, local_rank=rank, local_size=2)
settings = StallSettings(deadline=1.0, least=0.2, tick=0.1)
watch = StallWatch(context, FolderPosts(folder), place=board_place(board), settings=settings,
                   say=lambda text: print(text, flush=True))
with watch:
    board.barrier("start")
    board.enter("update", 7)
    told = folder / "process"
    if rank == 1:
        told.with_suffix(".new").write_text(str(os.getpid()))
        told.with_suffix(".new").rename(told)
        os.kill(os.getpid(), signal.SIGSTOP)
    # Only then does anybody wait: a busy machine may take its time until the other is stopped.
    while not (told.exists() and is_stopped(told.read_text())):
        time.sleep(0.01)
    board.barrier("gradients")
"""


def test_a_stopped_process_gives_no_sign_and_is_named_all_the_same(tmp_path: Path) -> None:
    with board_memory() as descriptor:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(descriptor), str(rank), str(tmp_path)],
                pass_fds=[descriptor],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            assert processes[0].stdout is not None
            line = processes[0].stdout.readline()
            second = processes[0].stdout.readline()
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    assert line.startswith("stall: rank 0 has waited ")
    assert "in 'gradients' of update 7" in line
    assert "rank 1 on host " in second
    assert "gives no sign" in second


@pytest.mark.parametrize(
    ("update_seconds", "limit"), [(None, 30.0), (0.01, 5.0), (1.0, 10.0), (2.9, 29.0), (60.0, 30.0)]
)
def test_the_limit_follows_the_median_update_and_stays_within_the_deadline(
    update_seconds: float | None, limit: float
) -> None:
    assert StallSettings(deadline=60.0).limit(update_seconds) == limit


def test_the_length_of_an_update_is_seen_from_outside() -> None:
    progress = RankProgress(0.0)
    progress.see(("update", 0), 1.0)
    progress.see(("update", 4), 3.0)  # four updates in two seconds
    progress.see(("summing gradients", 4), 3.2)
    progress.see(("update", 6), 4.0)
    assert RankProgress(0.0).update_seconds is None
    progress.see(("update", 7), 4.5)
    assert progress.update_seconds == 0.5
    assert progress.since == 4.5
    assert not progress.see(("update", 7), 9.0)


def test_a_frame_of_ordinary_code_does_not_wait() -> None:
    assert waits_in(sys._getframe()) is None


def test_the_code_that_waits_is_where_the_watch_looks_for_it() -> None:
    for file, function, _ in FRAMES_THAT_WAIT:
        if file.startswith("paceline/"):
            source = Path(paceline.__file__).parents[1] / file
            assert f"def {function}" in source.read_text(), f"{file} has no {function}"


def open_server() -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client_of(server: Any, patience: float = PATIENCE) -> StorePosts:
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = server.port
    return StorePosts(
        lambda: TCPStore("127.0.0.1", port, timeout=timedelta(seconds=5)), patience=patience
    )


def test_posts_in_a_store_and_in_a_store_that_is_gone() -> None:
    server = open_server()
    posts = client_of(server)
    assert posts.read(0) is None
    posts.post(0, {"host": "a"})
    assert posts.read(0) == {"host": "a"}
    other = client_of(server)
    assert other.read(0) == {"host": "a"}
    other.close()
    del server
    posts.post(0, {"host": "b"})
    assert posts.read(0) is None
    posts.close()


class Hanging:
    """A store behind a network that is cut: it answers once that is mended."""

    def __init__(self) -> None:
        self.mended = threading.Event()
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.mended.wait(PATIENCE)
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.mended.wait(PATIENCE)
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        self.mended.wait(PATIENCE)
        return all(key in self.kept for key in keys)


def test_a_store_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    hanging = Hanging()
    store = StorePosts(lambda: hanging, patience=0.1)
    posts = BothPosts(FolderPosts(tmp_path), store)
    posts.post(0, {"host": "a", "time": 1.0})
    assert posts.read(0) == {"host": "a", "time": 1.0}  # by the folder
    assert store.read(0) is None
    store.post(0, {"host": "a", "time": 2.0})  # not kept: it would be old news when it arrives
    hanging.mended.set()
    end = time.monotonic() + PATIENCE
    while store.read(0) is None and time.monotonic() < end:
        time.sleep(0.01)
    assert store.read(0) == {"host": "a", "time": 1.0}
    store.post(0, {"host": "a", "time": 3.0})
    assert posts.read(0) == {"host": "a", "time": 3.0}
    store.close()


def test_posts_in_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_text("in the way")
    posts = FolderPosts(tmp_path)
    posts.post(0, {"host": "a"})
    assert posts.read(0) is None
    (tmp_path / "rank-1").mkdir()
    (tmp_path / "rank-1" / "watch.json").write_text(json.dumps([1]))
    assert posts.read(1) is None
