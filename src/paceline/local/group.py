"""One Gloo process group for the ranks of a node, and a group per row of stages."""

from __future__ import annotations

import atexit
import datetime
import socket
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from paceline.local.base import Job

_PROBE_BYTES = 4 * 2**20
_PROBE_ROUNDS = 5
_rows: dict[tuple[int, ...], dist.ProcessGroup] = {}


def init_gloo(job: Job) -> None:
    """Join the ranks of the node over Gloo on the loopback interface.

    The first rank listens on a port that the system chooses and tells the others
    through the board, so nothing is fixed and nothing is left behind.
    """
    board = job.board
    assert board is not None
    # A leg of other ranks may have come between: only where all are in a group of just these, which
    # is then the same one, is it used again.
    joined = dist.is_initialized() and dist.get_world_size() == board.ranks
    if board.sum([float(joined)], "groups")[0] == board.ranks:
        return
    close_gloo()
    timeout = datetime.timedelta(seconds=board.deadline)
    store: TCPStore | None = None
    if board.rank == 0:
        # Left to itself, torch's store listens to the whole world, whatever address it is given.
        listener = socket.create_server(("127.0.0.1", 0), backlog=board.ranks)
        store = TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            board.ranks,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    port = int(board.sum([float(store.port) if store is not None else 0.0], "rendezvous")[0])
    if store is None:
        store = TCPStore("127.0.0.1", port, board.ranks, is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo", store=store, rank=board.rank, world_size=board.ranks, timeout=timeout
    )
    atexit.register(close_gloo)


def close_gloo() -> None:
    """Leave the group, if this process is in one."""
    _rows.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def row_groups(rows: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup:
    """The group of the row that `rank` is in; every rank of the node calls it with all rows."""
    found: dist.ProcessGroup | None = None
    for row in rows:
        key = tuple(row)
        if key not in _rows:
            # Every rank makes every group, its own or not: torch counts them to name them.
            _rows[key] = dist.new_group(list(row))
        if rank in row:
            found = _rows[key]
    assert found is not None
    return found


def measure_bandwidth(job: Job) -> float:
    """Bytes per second between two ranks of the node (median round trip of 4 MB); all call it."""
    board = job.board
    assert board is not None
    seconds = 0.0
    if board.rank < 2:
        block = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
        rounds = []
        for _ in range(_PROBE_ROUNDS):
            start = time.perf_counter()
            if board.rank == 0:
                dist.send(block, 1)
                dist.recv(block, 1)
            else:
                dist.recv(block, 0)
                dist.send(block, 0)
            rounds.append(time.perf_counter() - start)
        seconds = statistics.median(rounds[1:]) / 2
    return _PROBE_BYTES / board.sum([seconds if board.rank == 0 else 0.0], "bandwidth")[0]
