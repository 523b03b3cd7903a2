"""Whole command lines that ask for what cannot be, each in a process of its own with a deadline.

Each must end with one sentence and a code that is not 0, or do what it was asked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

MOST = 2**63 - 1
SMALL = (
    "workload.model=shallow_cnn",
    "workload.data=synthetic",
    "workload.batch_size=16",
    "data.options.shape=[1, 28, 28]",
    "data.options.samples=64",
    "data.options.test_samples=16",
    "train.epochs=1",
    "numerics.precision=fp32",
    "local.strategy=threads",
    "local.threads=1",
)
# Settings of a training that takes a second.
SETTINGS = (
    "optimizer.learning_rate=1e308",
    "optimizer.learning_rate=1e-320",
    "optimizer.weight_decay=1e308",
    "optimizer.clip_norm=1e308",
    "optimizer.clip_norm=1e-320",
    "optimizer.step_every=1e-320",
    "optimizer.reference_batch=1",
    f"optimizer.reference_batch={MOST}",
    "train.deadline=1e308",
    "train.deadline=1e18",
    "observe.samples_every=1e308",
    "observe.samples_every=1e-300",
    "exchange.bucket_mb=1e308",
    f"exchange.every={MOST}",
    "data.image_size=1000000",
    "data.image_size=60000",
    f"data.limit={MOST}",
    "data.workers=100000",
    "data.options.shape=[1, 0, 0]",
    "data.options.shape=[9999, 9999, 9999]",
    "data.options.shape=[1, 28]",
    "data.options.shape=[1, -28, 28]",
    "data.options.shape=['a']",
    "data.options.samples=0",
    f"data.options.samples={MOST}",
    "data.options.samples=1e18",
    "data.options.samples=-5",
    f"data.options.classes={MOST}",
    f"workload.classes={MOST}",
    "workload.classes=2147483648",
    f"workload.batch_size={MOST}",
    f"train.steps={MOST}",
    f"train.keep={MOST}",
    f"train.evaluate_every={MOST}",
    f"train.checkpoint_every={MOST}",
    f"seed={MOST}",
    f"train.until.patience={MOST}",
    "local.threads=1000000000",
    "local.threads=100000",
    f"name={'x' * 5000}",
    "name=..",
    "name=.",
    'name="a\\u0000b"',
    'name="\\u001b[31m"',
    "name=[red]x[/]",
    'workload.data="a\\u0000b"',
    'workload.weights="a\\u0000b"',
    f"workload.weights={'x' * 5000}",
    f"workload.data=./{'x' * 5000}",
    'data.root="a\\u0000"',
    "workload.weights=/dev/zero",
    "workload.weights=/proc/self/mem",
    "workload.data=/proc",
    "workload.data=/dev/null",
    f"train.epochs={'9' * 5000}",
    f"train.epochs=0x{'f' * 5000}",
    f"workload.model_options.a={'[' * 500}",
    f"workload.model_options.a={'[' * 500}{']' * 500}",
    f"{'a.' * 100000}a=1",
    f"workload.model_options.{'a.' * 500}a=1",
    "train.epochs=1979-05-27",
    "train.epochs=10**400",
    "workload.model_options.dropout=1e308",
    "workload.model_options.dropout=nan",
    "optimizer.momentum=1979-05-27T07:32:00Z",
)
ELSEWHERE = (
    "local.replicas=100000",
    "local.stages=1000",
    "local.processes=100000",
    "workload.model=builtins:exit",
    "optimizer.name=os:system",
)
"""Bounds that other parts of the package have to keep: strategies, references to code."""
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("train", "/dev/zero"),
    ("train", "/proc/self/mem"),
    ("train", "x" * 5000),
    ("train", "/"),
    ("train", "--run", "x" * 5000),
    ("train", "--plan", "/dev/zero"),
    ("train", "--plan", "/"),
    ("train", "--hosts", "a,b:99999999999"),
    ("train", "--hosts", "a:²"),
    ("train", "--hosts", "\x1b"),
    ("train", "--hosts", "a:" + "9" * 5000),
    ("report", "/dev/null"),
    ("report", "x" * 5000),
    ("runs", "x" * 5000),
    ("runs", "/proc/self/fd"),
    ("trace", "/tmp", "--output", "/"),
    ("compare", "/", "x" * 5000),
    ("audit", "x" * 5000),
    ("models", "vgg16", "--image-size", "10" * 9),
    ("models", "vgg16", "--classes", str(MOST)),
    ("models", "vgg16", "--channels", str(MOST)),
    ("models", "vgg16", "--option", "dropout=" + "9" * 5000),
    ("models", "x" * 5000),
    ("models", "vgg16", "--option", "dropout=nan"),
    ("data", "show", "x" * 5000),
    ("data", "show", "synthetic"),
    ("experiment", "x" * 5000),
    ("experiment", "../../.."),
    ("forecast", "--machines", "/dev/zero"),
    ("forecast", "--nodes", "1,2,...,1000000000"),
    ("forecast", "--machines", "m.json", "--nodes", "1,2,...,1000000000"),
    ("forecast", "--machines", "m.json", "--nodes", "9" * 5000),
    ("forecast", "--machines", "m.json", "--price", "nan/h"),
    ("forecast", "--machines", "m.json", "--mix", "1e308,1e-308"),
    ("forecast", "--machines", "m.json", "--mix", "1/0"),
    ("lab", "run", "/dev/zero", "--", "true"),
    ("forecast", "--machines", "m.json", "--link", "1e400Gbit/s,0ms"),
    ("forecast", "--machines", "m.json", "--link", "1Gbit/s,-1ms"),
    ("--nothing",),
    ("x" * 5000,),
)
DEADLINE = 60.0
"""Seconds; those that do not refuse train for one or two."""


def lines() -> list[tuple[str, ...]]:
    """All command lines."""
    small = [word for each in SMALL for word in ("--set", each)]
    asked = [("train", *small, "--set", each) for each in (*SETTINGS, *ELSEWHERE)]
    return [*asked, *COMMANDS]


def outcome(line: tuple[str, ...], folder: Path) -> str:
    """What is wrong with how a command line ended; empty where nothing is."""
    output = folder / "output.txt"
    child = os.fork()
    if child == 0:
        _become(line, folder, output)
    end = time.monotonic() + DEADLINE
    status = None
    while status is None:
        done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            status = None
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"a hang: {output.read_text(errors='replace')[-300:]}"
            time.sleep(0.01)
    code = os.waitstatus_to_exitcode(status)
    text = output.read_text(errors="replace")
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if "internal error" in text or "Traceback" in text:
        return text[-600:]
    if any(c in text for c in "\x1b\0\a"):
        return f"control characters: {text[-300:]!r}"
    if code == 0 and ("nan" in text.replace("finance", "").lower().split()):
        return f"NaN, and exit code 0: {text[-300:]}"
    if code and not text.strip():
        return f"exit code {code} without a word"
    return ""


def _become(line: tuple[str, ...], folder: Path, output: Path) -> None:
    from paceline import cli

    os.setpgid(0, 0)
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["PACELINE_CACHE"] = str(folder / "cache")
    code = 99
    try:
        cli.main(list(line))
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    """All of them, one after the other; how many ended badly."""
    import json

    import readers
    import torch  # noqa: F401

    from paceline.schema import encode

    bad = 0
    for line in lines():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            machines = readers.measured_machines(readers.host("a"), readers.host("b"))
            (folder / "m.json").write_text(json.dumps(encode(machines)))
            wrong = outcome(line, folder)
        if wrong:
            bad += 1
            said = " ".join(word if len(word) < 80 else f"{word[:60]}..." for word in line[-4:])
            print(f"    {said}: {wrong}", flush=True)
    print(f"{'command lines':24} {len(lines()):8} lines, {bad} ended badly", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
