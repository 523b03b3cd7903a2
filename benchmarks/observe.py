"""What observing costs: the same training with and without events, side by side.

    python -m benchmarks.observe [--rounds 9] [--epochs 3] [--strategy threads]

mnist_cnn on the embedded digits, small updates, so that the cost per update shows; the two
alternate. The bar: at most 1% of throughput lost.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.interleave import interleave
from paceline.api import Workload, train
from paceline.local.cores import usable_cores
from paceline.schema.events import read_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--strategy", choices=("threads", "processes"), default="threads")
    parser.add_argument("--model", default="mnist_cnn")
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    spans: list[int] = []

    def run(events: bool) -> float:
        workload = Workload(model=options.model, batch_size=options.batch_size)
        settings = {
            "observe.events": events,
            "local.strategy": options.strategy,
            "local.threads": usable_cores() if options.strategy == "threads" else 1,
            "train.evaluate_every": options.epochs,
        }
        with tempfile.TemporaryDirectory() as folder:
            result = train(
                workload,
                epochs=options.epochs,
                settings=settings,
                run=Path(folder) / "run",
                silent=True,
            )
            ranks = read_run(result.run)
            # A comparison of a run with itself would always pass.
            assert bool(ranks) == events, "observe.events has no effect"
            spans.extend(len(session.spans) for past in ranks.values() for session in past)
        return float(result.summary["update_seconds_median"])

    found = interleave(
        {"without events": lambda: run(False), "with events": lambda: run(True)}, options.rounds
    )
    # The two of one round are seconds apart, rounds minutes: the ratio is taken within rounds.
    pairs = zip(found["with events"].rounds, found["without events"].rounds, strict=True)
    ratios = sorted(observed / bare for observed, bare in pairs)
    for name, measured in found.items():
        print(
            f"{name:15} {measured.median * 1000:7.2f} ms per update"
            f"  (spread {measured.spread:.0%}, {options.rounds} rounds)"
        )
    print(
        f"with / without: {statistics.median(ratios):.4f}, from {ratios[0]:.4f} to"
        f" {ratios[-1]:.4f} (bar: at most 1.01); {statistics.median(spans):.0f} spans per rank"
    )


if __name__ == "__main__":
    main()
