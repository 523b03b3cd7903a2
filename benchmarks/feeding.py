"""How long training waits for photographs: first epoch (decoding) and second (from the cache).

    PACELINE_DATA=DIR python -m benchmarks.feeding [--strategy threads] [--own] [--limit N]
    PACELINE_DATA=DIR python -m benchmarks.feeding --cpu [--limit N]

AlexNet at 224x224 on DIR/fire, batch 32, with an empty cache of decoded images. The bar: in the
second epoch less than 5% of the time. With --own also a plain `Dataset` of the same files that has
no cache (benchmarks/photographs.py). The bar there: the first epoch, in which Paceline's folder
decodes too, within 10% of the folder's images per second. `--own --limit 400` is a short form.

With --cpu nothing is trained: CPU seconds of a photograph, batches of the ways interleaved, read by
the plain `Dataset` alone, by the same through Paceline, and by Paceline's folder. What the second
takes more than the first is the price of handling the user's own dataset.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "fire.toml"
OWN = f"workload.data={HERE / 'photographs.py'}:fire"


def epochs(title: str, *settings: str) -> list[dict[str, Any]]:
    """Train two epochs; what metrics.jsonl says of each."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "paceline.cli", "train", str(EXAMPLE), f"--run={run}"]
        for setting in ("train.epochs=2", f"data.cache={folder}/cache", *settings):
            command += ["--set", setting]
        subprocess.run(command, check=True, env=os.environ)
        lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        share = line["read_seconds"] / line["seconds"]
        print(
            f"{title}, epoch {line['epoch']}: {line['seconds']:.1f} s, of which"
            f" {line['read_seconds']:.2f} s waiting for data ({share:.1%}),"
            f" {line['images_per_second']:.1f} images/s"
        )
    return lines


def cpu_seconds(limit: int) -> None:
    """Each way reads the same number of photographs, batch by batch in turn, on one thread."""
    import numpy as np
    import torch
    from torch.utils.data import default_collate

    from benchmarks.photographs import fire
    from paceline.data import DataRequest, open_dataset
    from paceline.data.own import as_source

    torch.set_num_threads(1)
    plain, _ = fire()
    source = as_source(plain, seed=0)
    with tempfile.TemporaryDirectory() as cache:
        request = DataRequest(
            name="fire", root=os.environ["PACELINE_DATA"], image_size=224, cache=cache, workers=1
        )
        folder = open_dataset(request).train
        ways: dict[str, Callable[[np.ndarray], object]] = {
            "own Dataset, plain loop": lambda part: default_collate([plain[n] for n in part]),
            "own Dataset, Paceline": lambda part: source.fetch(part, epoch=0, augment=True),
            "folder": lambda part: folder.fetch(part, epoch=0, augment=False),
        }
        spent: dict[str, list[float]] = {name: [] for name in ways}
        numbers = np.random.default_rng(0).permutation(len(plain))[:limit]
        for start in range(0, len(numbers), 32):
            part = numbers[start : start + 32]
            for name, read in ways.items():
                began = time.process_time()
                read(part)
                spent[name].append((time.process_time() - began) / len(part))
    for name, each in spent.items():
        middle, deviation = statistics.median(each), statistics.pstdev(each)
        spread = f"standard deviation {1000 * deviation:.2f}"
        print(f"{name}: {1000 * middle:.2f} ms of CPU per photograph ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="threads")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    if options.cpu:
        cpu_seconds(options.limit or 320)
        return
    settings = [f"local.strategy={options.strategy}"]
    settings += [f"data.limit={options.limit}"] if options.limit else []
    folder = epochs("folder", *settings)
    if options.own:
        own = epochs("own Dataset", *settings, OWN)
        ratio = own[0]["images_per_second"] / folder[0]["images_per_second"]
        print(f"own Dataset / folder, first epochs: {ratio:.2f} (bar 0.90)")


if __name__ == "__main__":
    main()
