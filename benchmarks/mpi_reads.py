"""MPI-IO beside plain reads: ranks of one machine that need an idx file, or their samples of it.

    python -m benchmarks.mpi_reads [--ranks 2] [--images 60000] [--rounds 7] [--folder DIR] [--cold]

Two questions, two ways each, in turns:

    whole      every rank reads the file      | each reads its part with all others, then Allgather
    samples    every rank takes its samples   | all take theirs at once, through an indexed view of
               of a shuffled epoch from a     | the file
               memory map                     |

Seconds are those of the slowest rank, medians of the rounds with the smallest and largest. `--cold`
asks the kernel to forget the file before every turn; where others share its cache, or it lies in
memory, it cannot. `--folder` chooses the file system, such as one that hosts share. What both ways
read is compared in every round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 28
HEADER = 16
"""Bytes before the pixels: magic number and three lengths."""


def write_idx(path: Path, images: int) -> None:
    """Pictures of noise, as MNIST's files have them."""
    pixels = np.random.default_rng(0).integers(0, 256, (images, SIDE, SIDE), dtype=np.uint8)
    path.write_bytes(struct.pack(">4I", 0x803, images, SIDE, SIDE) + pixels.tobytes())


def read_plainly(path: Path) -> np.ndarray:
    """The whole file."""
    return np.frombuffer(path.read_bytes(), np.uint8)


def read_in_parts(path: Path, comm: Any) -> np.ndarray:
    """The whole file, of which every rank has read its own part from the disk."""
    from mpi4py import MPI

    file = MPI.File.Open(comm, str(path), MPI.MODE_RDONLY)
    try:
        size, ranks = file.Get_size(), comm.Get_size()
        edges = [size * rank // ranks for rank in range(ranks + 1)]
        whole = np.empty(size, np.uint8)
        mine = whole[edges[comm.Get_rank()] : edges[comm.Get_rank() + 1]]
        file.Read_at_all(edges[comm.Get_rank()], mine)
    finally:
        file.Close()
    counts = np.diff(edges).tolist()
    comm.Allgatherv(MPI.IN_PLACE, [whole, counts, edges[:-1], MPI.BYTE])
    return whole


def own_samples(images: int, comm: Any) -> np.ndarray:
    """This rank's numbers of one shuffled epoch."""
    order = np.random.default_rng(1).permutation(images)
    return order[comm.Get_rank() :: comm.Get_size()]


def take_mapped(path: Path, numbers: np.ndarray) -> np.ndarray:
    """Some samples by a memory map, as Paceline's cached arrays give them."""
    pixels = np.memmap(path, np.uint8, "r", HEADER).reshape(-1, SIDE * SIDE)
    return np.take(pixels, numbers, axis=0)


def take_together(path: Path, numbers: np.ndarray, comm: Any) -> np.ndarray:
    """Some samples of every rank by one collective read."""
    from mpi4py import MPI

    placed = np.sort(numbers)  # a view of a file goes forward
    sample = MPI.BYTE.Create_contiguous(SIDE * SIDE).Commit()
    view = sample.Create_indexed_block(1, placed.tolist()).Commit()
    file = MPI.File.Open(comm, str(path), MPI.MODE_RDONLY)
    try:
        file.Set_view(HEADER, sample, view)
        found = np.empty((len(numbers), SIDE * SIDE), np.uint8)
        file.Read_all([found, len(numbers), sample])
    finally:
        file.Close()
        view.Free()
        sample.Free()
    return found[np.argsort(np.argsort(numbers))]


def forget(path: Path) -> None:
    """Ask the kernel to take the file out of its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def measure(path: Path, images: int, rounds: int, cold: bool) -> None:
    """What each rank does; the first prints."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    numbers = own_samples(images, comm)
    ways: dict[str, Callable[[], np.ndarray]] = {
        "whole, plain": lambda: read_plainly(path),
        "whole, collective": lambda: read_in_parts(path, comm),
        "samples, memory map": lambda: take_mapped(path, numbers),
        "samples, collective": lambda: take_together(path, numbers, comm),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        found = []
        for name, way in ways.items():
            if cold:
                forget(path)
            comm.Barrier()
            began = time.perf_counter()
            found.append(way())
            seconds[name].append(comm.allreduce(time.perf_counter() - began, MPI.MAX))
        for plain, collective in (found[:2], found[2:]):
            if not np.array_equal(plain, collective):
                sys.exit(f"rank {comm.Get_rank()}: the two ways do not give the same samples")
    if comm.Get_rank() == 0:
        print(f"{comm.Get_size()} ranks, {path.stat().st_size / 1e6:.1f} MB, {rounds} rounds")
        for name, taken in seconds.items():
            middle = 1e3 * statistics.median(taken)
            print(f"{name:20} {middle:9.1f} ms ({1e3 * min(taken):.1f} to {1e3 * max(taken):.1f})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the file is written; a temporary one")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of is not None:
        measure(asked.rank_of, asked.images, asked.rounds, asked.cold)
        return 0
    from paceline.launch.mpi import MpiEngine

    mpiexec = MpiEngine().mpiexec.path
    own = [f"--{name}={getattr(asked, name)}" for name in ("images", "rounds")]
    own += ["--cold"] if asked.cold else []
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        path = Path(folder) / "images-idx3-ubyte"
        write_idx(path, asked.images)
        os.sync()
        words = [mpiexec, "-n", str(asked.ranks), "--bind-to", "none", "--oversubscribe"]
        words += [sys.executable, "-m", "benchmarks.mpi_reads", "--rank-of", str(path), *own]
        allowed = {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
        return subprocess.run(words, env=os.environ | allowed).returncode


if __name__ == "__main__":
    sys.exit(main())
