"""A loop of one's own on two emulated hosts: `paceline.Pace` beside DistributedDataParallel.

    python -m benchmarks.own_loop [--rounds 3] [--rate 1gbit]

AlexNet, 32 images at 224x224 per update, in turns, each by `paceline run --hosts lab`: seconds per
update, the first two left out. Bar: not slower than DDP by more than the spread.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline import Pace, models

LAB = Path(__file__).parents[1] / "examples" / "lab" / "two-hosts.toml"
WAYS = ("pace", "ddp")
RESULT = "seconds per update:"
BATCH, WARMING, EPOCHS = 32, 2, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", default="1gbit", help="of the network")
    parser.add_argument("--way", choices=WAYS, help="what a rank of a round does")
    options = parser.parse_args()
    if options.way:
        train(options.way)
        return
    seen: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way, found in seen.items():
            found.append(measured(way, options.rate))
            print(f"  round {number + 1}/{options.rounds}, {way}: {found[-1]:.3f} s", flush=True)
    ratios = sorted(ddp / pace for pace, ddp in zip(*seen.values(), strict=True))
    middles = {way: statistics.median(found) for way, found in seen.items()}
    print(
        f"AlexNet, two hosts, {options.rate}: pace {middles['pace']:.3f} s, DDP"
        f" {middles['ddp']:.3f} s, {statistics.median(ratios):.2f} times as fast"
        f" ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def measured(way: str, rate: str) -> float:
    """Seconds of an update in a lab of its own."""
    paceline = str(Path(sys.executable).with_name("paceline"))
    with tempfile.TemporaryDirectory() as folder:
        line = [paceline, "lab", "run", "--set", f"link.rate={rate}", str(LAB), "--", paceline]
        line += ["run", "--hosts", "lab", "--nproc", "1", __file__, "--way", way]
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=1800)
    told = [text for text in done.stdout.splitlines() if RESULT in text]
    if done.returncode != 0 or not told:
        raise SystemExit(f"{' '.join(line)} failed:\n{done.stdout}{done.stderr}")
    return float(told[0].rpartition(" ")[2])


def train(way: str) -> None:
    """A rank's part of a round."""
    torch.manual_seed(0)
    model = models.build("alexnet", classes=3, channels=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    data = TensorDataset(torch.randn(64, 3, 224, 224), torch.randint(0, 3, (64,)))
    loader: Iterable[Any] = DataLoader(data, BATCH)
    if way == "pace":
        pace = Pace(shares=[1, 1])
        model, optimizer, loader = pace.prepare(model, optimizer, loader)
        times = updates(model, optimizer, loader, pace.epochs(EPOCHS), pace.backward)
        rank = pace.rank
    else:
        torch.distributed.init_process_group("gloo")
        rank, half = torch.distributed.get_rank(), BATCH // 2
        parts = slice(rank * half, (rank + 1) * half)
        loader = [(inputs[parts], targets[parts]) for inputs, targets in loader]
        wrapped = DistributedDataParallel(model)
        times = updates(wrapped, optimizer, loader, range(EPOCHS), torch.Tensor.backward)
        torch.distributed.destroy_process_group()
    if rank == 0:
        print(RESULT, f"{statistics.median(times[WARMING:]):.4f}", flush=True)


def updates(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    epochs: Iterable[int],
    backward: Callable[[torch.Tensor], None],
) -> list[float]:
    """Seconds of each update."""
    times = []
    for _ in epochs:
        for inputs, targets in loader:
            began = time.perf_counter()
            optimizer.zero_grad()
            backward(cross_entropy(model(inputs), targets))
            optimizer.step()
            times.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
