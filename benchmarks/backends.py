"""Backends side by side: all-reduce by size, and a DDP step with overlap against without.

    python benchmarks/backends.py [--mpich PYTHON] [--ranks 2 4] [--rounds 3]

Every round starts each backend once, one after the other, so that a busy moment hits all alike. An
all-reduce is timed from a barrier to its end on the slowest rank. Printed are medians over all
rounds with the quartiles around them. `--mpich` is the Python of an environment whose mpi4py uses
the mpich wheel; both wheels cannot be in one environment, since each brings its own `mpiexec`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KILOBYTE = 1024
SIZES = [KILOBYTE << shift for shift in (0, 4, 8, 10, 12, 14, 16, 18)]
LAYERS, WIDTH, BATCH = 6, 1024, 128


# -- on the ranks ----------------------------------------------------------------------------------


def measure_all_reduce(sizes: list[int]) -> dict[str, list[float]]:
    """Seconds of every repetition, by size, on the slowest rank."""
    import torch
    import torch.distributed as dist

    found = {}
    for size in sizes:
        tensor = torch.ones(size // 4)
        repetitions = max(4, min(60, (64 << 20) // size))
        times = []
        for repetition in range(repetitions + 2):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(tensor)
            if repetition >= 2:
                times.append(time.perf_counter() - started)
            tensor.fill_(1.0)
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found[str(size)] = slowest.tolist()
    return found


def measure_step() -> dict[str, list[float]]:
    """Seconds of a training step: computing alone, with overlap, and without."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    network = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=4)
    inputs = torch.randn(BATCH, WIDTH)

    def compute() -> None:
        with network.no_sync():
            network(inputs).square().mean().backward()

    def overlapped() -> None:
        network(inputs).square().mean().backward()

    def one_after_the_other() -> None:
        compute()
        for parameter in network.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())

    kinds = {"compute": compute, "overlap": overlapped, "no overlap": one_after_the_other}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repetition in range(14):
        for kind, step in kinds.items():
            network.zero_grad()
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            if repetition >= 2:
                times[kind].append(time.perf_counter() - started)
    return times


def be_a_rank(backend: str, output: str, sizes: list[int]) -> None:
    """One rank of one launch."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend != "gloo":
        from paceline.backends import register_mpi

        register_mpi(transport="network" if backend == "network" else "auto")
        dist.init_process_group("mpi4py")
    else:
        dist.init_process_group("gloo")
    results = {"all_reduce": measure_all_reduce(sizes), "step": measure_step()}
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(results))
    dist.destroy_process_group()


# -- starting them ---------------------------------------------------------------------------------


def launch(label: str, python: str, ranks: int, sizes: list[int]) -> dict[str, Any]:
    """Run one backend once and read what rank 0 wrote."""
    backend = "gloo" if label == "gloo" else "mpi"
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        output = str(Path(directory) / "times.json")
        program = [str(Path(__file__).resolve()), "--rank-of", backend, output, json.dumps(sizes)]
        tools = Path(python).parent
        if backend == "gloo":
            command = [str(tools / "torchrun"), f"--nproc-per-node={ranks}", *program]
        else:
            options = ["--oversubscribe", "--bind-to", "none"] if "openmpi" in label else []
            command = [str(tools / "mpiexec"), "-n", str(ranks), *options, python, *program]
        environment = os.environ | {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
        }
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        if ended.returncode != 0:
            raise SystemExit(f"{label} with {ranks} ranks failed:\n{ended.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(Path(output).read_text())
        return found


def show(times: list[float]) -> str:
    """Median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles([1e3 * t for t in times], n=4)
    digits = 3 if middle < 10 else 1
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def name_of(size: int) -> str:
    """A size as people say it."""
    return f"{size // KILOBYTE} KB" if size < KILOBYTE**2 else f"{size // KILOBYTE**2} MB"


def compare(ranks: int, labels: dict[str, str], rounds: int, sizes: list[int]) -> None:
    """Measure one number of ranks and print its two tables."""
    pooled: dict[str, dict[str, dict[str, list[float]]]] = {}
    loads = []
    for _ in range(rounds):
        for label, python in labels.items():
            loads.append(os.getloadavg()[0])
            for kind, table in launch(label, python, ranks, sizes).items():
                for key, times in table.items():
                    place = pooled.setdefault(label, {}).setdefault(kind, {})
                    place.setdefault(key, []).extend(times)
    others = [label for label in labels if label != "gloo"]
    busy = f"load average before the launches {min(loads):.1f} to {max(loads):.1f}"
    print(f"\nAll-reduce, {ranks} ranks, float32, ms: median (quartiles); {busy}\n")
    print("| size |", " | ".join([*labels, *(f"gloo / {label}" for label in others)]), "|")
    print("|---" * (1 + len(labels) + len(others)) + "|")
    for size in map(str, sizes):
        cells = [show(pooled[label]["all_reduce"][size]) for label in labels]
        gloo = statistics.median(pooled["gloo"]["all_reduce"][size])
        for label in others:
            ratio = gloo / statistics.median(pooled[label]["all_reduce"][size])
            cells.append(f"{ratio:.1f}x")
        print(f"| {name_of(int(size))} |", " | ".join(cells), "|", flush=True)
    gradients = 4e-6 * LAYERS * (WIDTH + 1) * WIDTH
    print(f"\nTraining step, {ranks} ranks x 1 thread, {gradients:.0f} MB of gradients, ms\n")
    print("| backend | computing alone | DDP, overlapped | all-reduce after backward |")
    print("|---|---|---|---|")
    for label in labels:
        step = pooled[label]["step"]
        cells = [show(step[kind]) for kind in ("compute", "overlap", "no overlap")]
        print(f"| {label} |", " | ".join(cells), "|", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mpich", metavar="PYTHON", help="Python of an environment with mpich")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=256, help="in MB")
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        backend, output, sizes = arguments.rank_of
        be_a_rank(backend, output, json.loads(sizes))
        return
    labels = {"gloo": sys.executable, "mpi (openmpi)": sys.executable}
    if arguments.mpich:
        labels["mpi (mpich)"] = arguments.mpich
    sizes = [size for size in SIZES if size <= arguments.largest * KILOBYTE**2]
    for ranks in arguments.ranks:
        compare(ranks, labels, arguments.rounds, sizes)


if __name__ == "__main__":
    main()
