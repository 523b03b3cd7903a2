"""Memory of `paceline serve` while versions are swapped under a light load.

    python -m benchmarks.swapping MODELS/NAME/VERSION [--minutes 10] [--every 2] [--rate 50]

Copies of one exported version come and go in a folder that a server watches: a new one every few
seconds, the one before the last removed. `hey` asks all the while. Prints the resident memory of
the server every half minute, and at the end how the second half of the time compares with its
middle; every answer must be 200.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CONNECTIONS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two versions")
    parser.add_argument("--rate", type=int, default=50, help="requests per second")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        swap(options, Path(folder))


def swap(options: argparse.Namespace, folder: Path) -> None:
    model = folder / "models" / "swapped"
    shutil.copytree(options.version, model / "1")
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "paceline", "serve", str(model.parent), "--port", "0"],
        stdout=(folder / "log").open("w"),
        text=True,
    )
    try:
        address = f"http://127.0.0.1:{wait_for(folder / 'log', r':([0-9]+)$')}"
        wait_for(folder / "log", "(version 1 answers)")
        shape = json.loads((model / "1" / "version.json").read_text())["signature"]["shape"]
        body = folder / "body.json"
        body.write_text(json.dumps({"instances": np.zeros((1, *shape)).tolist()}))
        seconds = int(options.minutes * 60)
        words = ["hey", "-z", f"{seconds}s", "-c", str(CONNECTIONS), "-m", "POST", "-D", str(body)]
        words += ["-q", str(options.rate // CONNECTIONS)]
        load = subprocess.Popen(
            [*words, f"{address}/v1/models/swapped:predict"], stdout=subprocess.PIPE, text=True
        )
        sizes = watch(server.pid, model, seconds, options.every)
        summary, _ = load.communicate()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    codes = dict(re.findall(r"\[(\d+)\]\s+(\d+) responses", summary))
    swaps = (folder / "log").read_text().count(" answers: ")
    print(f"{swaps} versions, answers {codes}")
    if "Error distribution" in summary or set(codes) != {"200"}:
        raise SystemExit(f"not every request was answered:\n{summary}")
    middle, last = sizes[len(sizes) * 4 // 10 : len(sizes) * 6 // 10], sizes[-len(sizes) // 5 :]
    print(
        f"resident memory: {sizes[0]:.0f} MB at first, {statistics.median(middle):.0f} MB in the"
        f" middle, {statistics.median(last):.0f} MB at the end, at most {max(sizes):.0f} MB"
    )


def wait_for(log: Path, pattern: str) -> str:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if found := re.search(pattern, log.read_text(), re.MULTILINE):
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"the server does not answer:\n{log.read_text()}")


def watch(server: int, model: Path, seconds: int, every: float) -> list[float]:
    """Swap versions, and look at the server's memory before each."""
    start, number, told, sizes = time.monotonic(), 1, 0.0, []
    while (now := time.monotonic() - start) < seconds:
        sizes.append(resident(server))
        if now >= told:
            print(f"{now:5.0f} s, version {number}: {sizes[-1]:.0f} MB", flush=True)
            told += 30
        number += 1
        partial = model / f".partial-{number}"
        shutil.copytree(model / str(number - 1), partial)
        partial.rename(model / str(number))
        shutil.rmtree(model / str(number - 2), ignore_errors=True)
        time.sleep(every)
    return sizes


def resident(process: int) -> float:
    text = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) / 1000


if __name__ == "__main__":
    main()
