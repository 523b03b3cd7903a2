"""How far apart two cores are, over time: `python -m benchmarks.distance [--seconds 60]`.

One process writes a number into shared memory, another answers, each on a core of its own: the
fastest of many round trips, a few times a second. On a virtual machine the hypervisor may move
cores to where they share no cache: then the number jumps, and strategies whose threads work
on one update together (`threads`) slow down, while `processes` hardly does.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import statistics
import time

from paceline.local.cores import pin, visible_cores

TRIPS = 2000
"""Round trips of one look."""
END = 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    cores = visible_cores()
    if len(cores) < 2:
        raise SystemExit(f"{len(cores)} core is visible here, but a distance needs two")
    first, second = cores[:2]
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    context = multiprocessing.get_context("fork")
    other = context.Process(target=answer, args=(memory, second), daemon=True)
    other.start()
    pin((first,))
    seen = []
    try:
        end = time.monotonic() + options.seconds
        while not seen or time.monotonic() < end:
            seen.append(look(memory))
            print(f"{seen[-1]:.0f}", end=" ", flush=True)
            time.sleep(0.25)
    finally:
        memory[0] = END
        other.join()
    print(
        f"\nround trips of cores {first} and {second}: median {statistics.median(seen):.0f} ns,"
        f" {min(seen):.0f} to {max(seen):.0f}"
    )


def look(memory: mmap.mmap) -> float:
    """The fastest tenth of many round trips, in nanoseconds."""
    times = []
    for number in range(TRIPS):
        ask, reply = 1 + number % 100, 101 + number % 100
        start = time.perf_counter_ns()
        memory[0] = ask
        while memory[0] != reply:
            pass
        times.append(time.perf_counter_ns() - start)
    memory[0] = 0
    return statistics.quantiles(times, n=10)[0]


def answer(memory: mmap.mmap, core: int) -> None:
    """Answer until told to end; sleep while nobody asks."""
    pin((core,))
    quiet = 0
    while (asked := memory[0]) != END:
        if 0 < asked <= 100:
            memory[0], quiet = asked + 100, 0
        else:
            quiet += 1
            if quiet > 100_000:
                time.sleep(0.001)


if __name__ == "__main__":
    main()
