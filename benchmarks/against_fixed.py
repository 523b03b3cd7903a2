"""What a training decided by itself, beside every way that can be asked for by name.

    PACELINE_DATA=DIR python -m benchmarks.against_fixed [--steps 3000] [--rounds 3] [CONFIG]

First a training of some minutes with an empty cache, which decides by itself. Then the plan that it
ended with and every fixed strategy train `--fixed` updates each, in turns. Bars: at most 5% of the
training went into finding the fastest way, and no fixed way is clearly more than 5% faster than the
plan it ended with (a difference inside the interval is a tie).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.interleave import Measured, interleave

ROOT = Path(__file__).parents[1]
STRATEGIES = ("threads", "replicas", "processes")
FORMATS = ("contiguous", "channels_last")
BAR = 0.05
"""Part that may go into finding the fastest way, and that the end may be behind the best."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default="examples/mnist.toml")
    parser.add_argument("--steps", type=int, default=3000, help="updates of the training")
    parser.add_argument("--fixed", type=int, default=100, help="updates of each fixed way")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        told = train(place / "auto", options.config, f"train.steps={options.steps}")
        finding, total = told["finding_seconds"], told["total_seconds"]
        last = (place / "auto" / "legs.jsonl").read_text().splitlines()[-1]
        print(
            f"decided by itself: {total:.0f} s, of which {finding:.1f} s"
            f" ({finding / total:.1%}) to find {json.loads(last)['name']}",
            flush=True,
        )
        steps = f"train.steps={options.fixed}"
        counter = itertools.count()

        def fixed(*more: str) -> float:
            run = place / f"fixed-{next(counter)}"
            return float(train(run, options.config, steps, *more)["update_seconds_median"])

        ways = {
            f"{strategy}, {layout}": (
                lambda s=strategy, m=layout: fixed(
                    f"local.strategy={s}", f"numerics.memory_format={m}", "numerics.precision=fp32"
                )
            )
            for strategy, layout in itertools.product(STRATEGIES, FORMATS)
        }
        plan = place / "auto" / "plan.json"
        ended = "what it ended with"
        found = interleave({ended: lambda: fixed(f"--plan={plan}"), **ways}, options.rounds)
    print(sentence(found, ended, finding / total))


def train(run: Path, config: str, *settings: str) -> dict[str, Any]:
    """One training with an empty cache; what its run.json says."""
    line = [sys.executable, "-m", "paceline", "train", config, "--run", str(run)]
    line += ["--set", "train.epochs=1000"]
    for setting in settings:
        line += [setting] if setting.startswith("--") else ["--set", setting]
    cache = {"PACELINE_CACHE": str(run.parent / f"cache-{run.name}")}
    done = subprocess.run(line, cwd=ROOT, env=os.environ | cache, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(line)} failed:\n{done.stdout}{done.stderr}")
    told: dict[str, Any] = json.loads((run / "run.json").read_text())
    return told


def sentence(found: dict[str, Measured], ended: str, finding: float) -> str:
    """How far the end is behind the best fixed way, round by round, and whether that is clear."""
    best = min((name for name in found if name != ended), key=lambda name: found[name].median)
    pairs = zip(found[ended].rounds, found[best].rounds, strict=True)
    behind = [mine / other - 1 for mine, other in pairs]
    middle = statistics.fmean(behind)
    error = statistics.stdev(behind) / math.sqrt(len(behind)) if len(behind) > 1 else math.inf
    missed = [f"{finding:.1%} went into finding it"] if finding > BAR else []
    if middle - 2 * error > BAR:
        missed.append(f"{best} is faster")
    return (
        f"what it ended with takes {middle:+.1%} (standard error {error:.1%}) of {best}, the best"
        f" fixed way; finding it {finding:.1%}"
        + (f"; MISSED: {', '.join(missed)}" if missed else "; bars held")
    )


if __name__ == "__main__":
    main()
