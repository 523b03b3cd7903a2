"""`make fuzz`: every target for as long as one likes, each in a process of its own.

    python tests/fuzz/long.py --seconds 600 [--only NAME] [--seed NUMBER]

Prints a line per target: inputs tried, faults, hangs, crashes. A fault's number repeats it:
`python tests/fuzz/long.py --only NAME --case NUMBER`. Exit code 1 where there was any.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from types import FrameType

HANG_SECONDS = 30.0
"""An input that takes longer is a hang: all of them are small."""
DIFFERENT = 20
"""Faults that a target may have before it is left: they are likely the same few."""


class HangError(BaseException):
    """Nothing catches it on the way: an input took too long."""


def main() -> int:
    """Start one process per target, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--case", type=int)
    asked = parser.parse_args()
    import lines
    from readers import targets

    names = [target.name for target in targets() if asked.only in target.name]
    if asked.case is not None:
        return repeat(names[0], asked.case)
    print(f"{len(names)} targets, {asked.seconds:g} s in all, seed {asked.seed}", flush=True)
    began, bad = time.monotonic(), 0
    if not asked.only:
        bad += lines.main()
    # On a busy machine whole command lines may take all the time: half of it is the readers'.
    left = max(asked.seconds / 2, asked.seconds - (time.monotonic() - began))
    for name in names:
        bad += one(name, asked.seed, left / len(names))
    return 1 if bad else 0


def one(name: str, seed: int, seconds: float) -> int:
    """Run a target until its time is over, past crashes; how many faults it had."""
    end, tried, crashes = time.monotonic() + seconds, 0, []
    faults: collections.Counter[str] = collections.Counter()
    first: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "note.json"
        while (left := end - time.monotonic()) > 0 and len(crashes) < 5 and len(faults) < DIFFERENT:
            note.write_text("{}")
            code = apart(name, seed + tried, left, note)
            found = json.loads(note.read_text() or "{}")
            tried += found.get("tried", 0)
            for text, case in found.get("faults", []):
                faults[text] += 1
                first.setdefault(text, case)
            if code == 0:
                break
            crashes.append(f"{code} at case {found.get('case')}")
            seed += 1_000_000
    hangs = sum(count for text, count in faults.items() if text.startswith("hang"))
    print(
        f"{name:24} {tried:8} inputs, {sum(faults.values()) - hangs} faults, {hangs} hangs,"
        f" {len(crashes)} crashes",
        flush=True,
    )
    for text, count in faults.most_common():
        print(f"    {count} x {text} (case {first[text]})", flush=True)
    for crash in crashes:
        print(f"    crash: {crash}", flush=True)
    return sum(faults.values()) + len(crashes)


def apart(name: str, seed: int, seconds: float, note: Path) -> int | str:
    """Run `work` in a child, which a crash may end; its exit code, or what ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.environ["PACELINE_CACHE"] = str(note.parent / "cache")
            tempfile.tempdir = str(note.parent)
            code = work(name, seed, seconds, note)
        finally:
            sys.stdout.flush()
            os._exit(code)
    end = time.monotonic() + seconds + 4 * HANG_SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hang"


def work(name: str, seed: int, seconds: float, note: Path) -> int:
    """In a process of its own: inputs one after the other, what was found in `note`."""
    from readers import FaultError, targets

    target = next(target for target in targets() if target.name == name)
    end, tried = time.monotonic() + seconds, 0
    faults: list[tuple[str, int]] = []
    signal.signal(signal.SIGALRM, _hang)
    warnings.simplefilter("ignore")  # of libraries, about what is damaged

    def write(case: int) -> None:
        note.write_text(json.dumps({"tried": tried, "case": case, "faults": faults}))

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        target.prepare(Path(folder))
        while time.monotonic() < end and len({text for text, _ in faults}) < DIFFERENT:
            case = seed + tried
            if tried % 50 == 0 or target.name == "image":
                write(case)
            signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
            try:
                target.run(random.Random(case), Path(folder))
            except FaultError as error:
                faults.append((f"{str(error)[:300]} [{_place(error)}]", case))
            except HangError:
                faults.append((f"hang in {traceback.format_exc().splitlines()[-3]}", case))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            tried += 1
        write(0)
    return 0


def _hang(number: int, frame: FrameType | None) -> None:
    raise HangError


def _place(error: BaseException) -> str:
    """Where in Paceline it was raised."""
    cause = error.__cause__ or error
    frames = [f for f in traceback.extract_tb(cause.__traceback__) if "paceline/" in f.filename]
    return f"{frames[-1].filename.rpartition('/src/')[2]}:{frames[-1].lineno}" if frames else ""


def repeat(name: str, case: int) -> int:
    """One input again, with the whole traceback."""
    from readers import targets

    target = next(target for target in targets() if target.name == name)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        target.prepare(Path(folder))
        target.run(random.Random(case), Path(folder))
    print("no fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
