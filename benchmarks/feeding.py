"""How long training waits for photographs: first epoch (decoding) and second (from the cache).

    PACELINE_DATA=DIR python -m benchmarks.feeding [--strategy threads]

AlexNet at 224x224 on DIR/fire, batch 32, with an empty cache of decoded images. The bar: in the
second epoch less than 5% of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "fire.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="threads")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "paceline.cli", "train", str(EXAMPLE), f"--run={run}"]
        command += ["--set", "train.epochs=2", "--set", f"local.strategy={options.strategy}"]
        command += ["--set", f"data.cache={folder}/cache"]
        subprocess.run(command, check=True, env=os.environ)
        lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        share = line["read_seconds"] / line["seconds"]
        print(
            f"epoch {line['epoch']}: {line['seconds']:.1f} s, of which {line['read_seconds']:.2f} s"
            f" waiting for data ({share:.1%}), {line['images_per_second']:.1f} images/s"
        )


if __name__ == "__main__":
    main()
