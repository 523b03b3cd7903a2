"""How long training waits for photographs: first epoch (decoding) and second (from the cache).

    PACELINE_DATA=DIR python -m benchmarks.feeding [--strategy threads] [--own] [--limit N]

AlexNet at 224x224 on DIR/fire, batch 32, with an empty cache of decoded images. The bar: in the
second epoch less than 5% of the time. With --own also a plain `Dataset` of the same files that has
no cache (benchmarks/photographs.py). The bar there: the first epoch, in which Paceline's folder
decodes too, within 10% of the folder's images per second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="threads")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    settings = [f"local.strategy={options.strategy}"]
    settings += [f"data.limit={options.limit}"] if options.limit else []
    folder = epochs("folder", *settings)
    if options.own:
        own = epochs("own Dataset", *settings, OWN)
        ratio = own[0]["images_per_second"] / folder[0]["images_per_second"]
        print(f"own Dataset / folder, first epochs: {ratio:.2f} (bar 0.90)")


if __name__ == "__main__":
    main()
