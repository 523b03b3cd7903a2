"""Starts real ranks, runs one function on each, and collects what they return.

    run_ranks("mpi", 2, "conformance:matrix", {"transport": "auto"}, timeout=600)

The function is called as `function(**arguments)` after `init_process_group`, in a module beside
this one, and returns something that JSON can hold. Nothing survives a call: on a timeout, and at
the end, every process that was started is killed.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Job:
    """How a job of several ranks went."""

    code: int | None
    """Exit code of the starter (the worst of the ranks for gloo); None when it was killed."""
    seconds: float
    output: str
    results: dict[int, Any]
    """What each rank returned; a rank that ended early is missing."""


def mpiexec_missing() -> str | None:
    """Why MPI jobs cannot be started here, or None."""
    from paceline.backends import mpi_missing

    missing = mpi_missing()
    if missing is None and find_mpiexec() is None:
        return "no mpiexec beside this Python or on the PATH"
    return missing


def find_mpiexec() -> str | None:
    """The mpiexec of this environment's wheel, else the one on the PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def mpiexec_command(size: int) -> list[str]:
    """The start of a command line for `size` ranks, as Open MPI or MPICH wants it."""
    program = find_mpiexec()
    assert program is not None
    version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=600)
    options = ["--oversubscribe", "--bind-to", "none"] if "HYDRA" not in version.stdout else []
    return [program, "-n", str(size), *options]


def run_ranks(
    engine: str,
    size: int,
    function: str,
    arguments: dict[str, Any] | None = None,
    *,
    timeout: float = 600.0,
    group_timeout: float = 30.0,
    environment: dict[str, str] | None = None,
) -> Job:
    """Run `module:function` on `size` ranks over `gloo` or `mpi`."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        order = {
            "engine": engine,
            "function": function,
            "arguments": arguments or {},
            "directory": directory,
            "group_timeout": group_timeout,
        }
        rank_command = [sys.executable, str(Path(__file__).resolve()), json.dumps(order)]
        base = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        }
        base |= {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        if engine == "mpi":
            commands = [([*mpiexec_command(size), *rank_command], base)]
        else:
            commands = [
                (rank_command, base | {"RANK": str(rank), "WORLD_SIZE": str(size)})
                for rank in range(size)
            ]
        return _watch(commands, Path(directory), timeout)


def _watch(
    commands: list[tuple[list[str], dict[str, str]]], directory: Path, timeout: float
) -> Job:
    started = time.monotonic()
    log = directory / "output.txt"
    with log.open("wb") as sink:
        processes = [
            subprocess.Popen(
                command, env=environment, stdout=sink, stderr=sink, start_new_session=True
            )
            for command, environment in commands
        ]
        codes: list[int | None] = []
        try:
            for process in processes:
                left = timeout - (time.monotonic() - started)
                try:
                    codes.append(process.wait(max(left, 0.01)))
                except subprocess.TimeoutExpired:
                    codes.append(None)
        finally:
            _end(processes)
    seconds = time.monotonic() - started
    results = {
        int(path.stem.removeprefix("rank-")): json.loads(path.read_text())
        for path in directory.glob("rank-*.json")
    }
    code = None if None in codes else max((c for c in codes if c is not None), key=abs)
    return Job(code, seconds, log.read_text(errors="replace"), results)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill what is left, children of children included."""
    family: list[psutil.Process] = []
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                family += psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    for process in processes:
        process.wait(300)


def _be_a_rank(order: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=order["group_timeout"])
    arguments = dict(order["arguments"])
    if order["engine"] == "mpi":
        from paceline.backends import BACKEND_NAME, register_mpi

        register_mpi(transport=arguments.pop("transport", "auto"))
        dist.init_process_group(BACKEND_NAME, timeout=limit)
    else:
        arguments.pop("transport", None)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{order['directory']}/store",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=limit,
        )
    module, _, name = order["function"].partition(":")
    rank = dist.get_rank()
    result = getattr(importlib.import_module(module), name)(**arguments)
    path = Path(order["directory"]) / f"rank-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").rename(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    _be_a_rank(json.loads(sys.argv[1]))
