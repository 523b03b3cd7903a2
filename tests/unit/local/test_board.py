"""The board and the arena between real processes that share nothing but two descriptors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from paceline.errors import DeadlineError, WorkerError
from paceline.local.board import Arena, Board, anonymous_memory

# Ranks wait for orders, because starting one costs as much as all of these tests. Each order
# has memory of its own, runs `act(board, arena)`, given as source, and prints what it returns.
RANK = """
import json, sys, time, os
from paceline.errors import PacelineError
from paceline.local.board import Arena, Board
for line in sys.stdin:
    order = json.loads(line)
    board = Board(order["board"], ranks=order["ranks"], rank=int(sys.argv[1]),
                  deadline=order["deadline"])
    names = {"time": time}
    exec(order["source"], names)
    try:
        result = names["act"](board, Arena(order["arena"], board))
    except PacelineError as error:
        result = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(result), flush=True)
"""
RANKS, ORDERS = 3, 12


@contextmanager
def memory() -> Iterator[tuple[int, int]]:
    board, arena = anonymous_memory("board"), anonymous_memory("arena")
    try:
        yield board, arena
    finally:
        os.close(board)
        os.close(arena)


Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """`run(ranks, source)`: what `act` returned on each rank, or the error it raised."""
    with ExitStack() as stack:
        places = [stack.enter_context(memory()) for _ in range(ORDERS)]
        descriptors = [descriptor for pair in places for descriptor in pair]
        processes = [_start(stack, rank, descriptors) for rank in range(RANKS)]

        def order(ranks: int, source: str, *, deadline: float = 30.0) -> list[Any]:
            board, arena = places.pop()
            text = json.dumps(
                {
                    "board": board,
                    "arena": arena,
                    "ranks": ranks,
                    "deadline": deadline,
                    "source": source,
                }
            )
            for process in processes[:ranks]:
                assert process.stdin is not None
                print(text, file=process.stdin, flush=True)
            outputs = [process.stdout for process in processes[:ranks]]
            return [json.loads(output.readline()) for output in outputs if output is not None]

        yield order


def _start(stack: ExitStack, rank: int, descriptors: list[int]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(rank)],
        pass_fds=descriptors,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def test_sums_barriers_and_announcements(run: Run) -> None:
    source = """
def act(board, arena):
    results = []
    for i in range(200):  # many rounds, so that a rank that runs ahead would be seen
        results.append(board.sum([board.rank + 1, i, 0.5])) if i % 2 else board.barrier("x")
    told = board.announce("héllo" if board.rank == 0 else None)
    again = board.announce("" if board.rank == 0 else None)
    return {"sums": results, "told": told, "again": again}
"""
    results = run(3, source)
    expected = [[6.0, 3.0 * i, 1.5] for i in range(1, 200, 2)]
    assert results == [{"sums": expected, "told": "héllo", "again": ""}] * 3


def test_ranks_that_stand_by_join_the_next_gloo_group(run: Run) -> None:
    source = """
import torch, torch.distributed as dist
from types import SimpleNamespace
from paceline.local.group import init_gloo
def act(board, arena):
    init_gloo(SimpleNamespace(board=board))
    init_gloo(SimpleNamespace(board=board))  # as the next strategy of the same ranks does
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)
"""
    for ranks in (2, 3, 2, 3):
        assert run(ranks, source) == [ranks] * ranks


def test_arena_is_one_memory_that_can_be_made_anew(run: Run) -> None:
    source = """
import numpy as np
def act(board, arena):
    found = []
    for size in (100_000, 10, 400_000):
        arena.clear()
        block = np.frombuffer(arena.allocate(size), np.uint8, size)
        assert not block.any(), "new memory is zero"
        board.barrier("looked")
        block[board.rank :: board.size] = board.rank + 1
        board.barrier("written")
        found.append(int(block.sum()))
        board.barrier("read")
    return found
"""
    assert run(2, source) == [[150_000, 15, 600_000]] * 2


def test_blocks_of_an_arena_lie_beside_each_other(run: Run) -> None:
    source = """
import numpy as np
def act(board, arena):
    blocks = []
    for number in range(3):
        blocks.append(np.frombuffer(arena.allocate(70_000), np.uint8))
        if board.rank == number:
            blocks[-1][:] = number + 1
    board.barrier("written")
    return [sorted({int(block.min()), int(block.max())}) for block in blocks]
"""
    assert run(3, source) == [[[1], [2], [3]]] * 3


def test_a_rank_that_does_not_come_is_named(run: Run) -> None:
    source = """
def act(board, arena):
    board.enter("update", 41 + board.rank)
    if board.rank == 1:
        board.enter("reading data", 42)
        while not board._header[1]: time.sleep(0.01)
        return "late"
    try:
        board.barrier("gradients")
    finally:
        board.abort()
"""
    result = run(2, source, deadline=0.5)
    assert result[0]["error"] == DeadlineError.__name__
    message = result[0]["message"]
    assert "rank 0 waited" in message
    assert "'gradients' of update 41" in message
    assert "rank 1 (in reading data of update 42)" in message
    assert "train.deadline" in message


def test_abort_frees_those_that_wait(run: Run) -> None:
    source = """
def act(board, arena):
    if board.rank == 1:
        time.sleep(0.2)
        board.abort()
        return "aborted"
    board.barrier("forever")
"""
    result = run(3, source)
    assert result[1] == "aborted"
    for rank in (0, 2):
        assert result[rank] == {"error": WorkerError.__name__, "message": "another rank failed"}


def test_all_ranks_stop_at_the_same_update(run: Run) -> None:
    source = """
def act(board, arena):
    for update in range(1000):
        board.enter("update", update)
        board.barrier("weights")
        if board.rank == 0 and update == 20:
            board.request_stop()
            board.request_stop()
        if board.should_stop(update + 1):
            return update + 1
"""
    first, second = run(2, source)
    assert first == second
    assert 21 < first < 30


@pytest.fixture
def alone() -> Iterator[Board]:
    with memory() as (descriptor, _):
        yield Board(descriptor, ranks=1, rank=0)


def test_alone_nothing_waits(alone: Board) -> None:
    alone.barrier("any")
    assert alone.sum([1.5, 2.0]) == [1.5, 2.0]
    assert alone.announce("text") == "text"


def test_phase_and_heartbeat(alone: Board) -> None:
    assert (alone.phase(0), alone.update(0), alone.heartbeat_age(0)) == ("", 0, None)
    alone.enter("a very long phase " * 10, 7)
    assert alone.phase(0).startswith("a very long phase a very")
    alone.enter("short")
    assert (alone.phase(0), alone.update(0)) == ("short", 7)
    alone.start_heartbeat()
    age = alone.heartbeat_age(0)
    assert age is not None
    assert 0 <= age < 30
    alone.close()
    assert not [t for t in threading.enumerate() if t.name == "paceline-heartbeat"]


def test_heartbeat_goes_on_by_itself(alone: Board) -> None:
    alone.start_heartbeat()
    first = int(alone._rows[0, 2])
    end = time.monotonic() + 300
    while int(alone._rows[0, 2]) == first and time.monotonic() < end:
        time.sleep(0.02)
    alone.close()
    assert int(alone._rows[0, 2]) > first


def test_what_does_not_fit_is_refused(alone: Board) -> None:
    with pytest.raises(ValueError, match="33 values do not fit"):
        alone.sum([0.0] * 33)
    with pytest.raises(ValueError, match="do not fit"):
        alone.announce("x" * 20_000)


def test_memory_has_no_name_anywhere() -> None:
    with memory() as (descriptor, arena):
        board = Board(descriptor, ranks=1, rank=0)
        block = np.frombuffer(Arena(arena, board).allocate(10_000), np.uint8)
        assert block.size >= 10_000
        assert os.get_inheritable(descriptor)
        assert not any(name.startswith("paceline") for name in os.listdir("/dev/shm"))  # noqa: PTH208
