"""A training over nodes of this machine, one of which is killed while it trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from paceline.schema.legs import Leg, read_legs

LEGS = "legs.jsonl"
MEMBER = "paceline.workflow.hosts_member"


def start(
    run: Path, nodes: int | str, changes: Sequence[str], *more: str, engine: str = "ssh"
) -> subprocess.Popen[str]:
    """`paceline train` on so many nodes of this machine, or on these hosts."""
    hosts = nodes if isinstance(nodes, str) else f"localhost:{nodes}"
    words = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "paceline.cli", "train", "--run", str(run), "-v", *more]
    return subprocess.Popen(
        [*command, "--hosts", hosts, "--engine", engine, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def member(process: subprocess.Popen[str], node: int, *, agent: bool = False) -> int:
    """The process that trains a node, or its agent."""
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            words, variables = child.cmdline(), child.environ()
        except psutil.Error:
            continue
        if MEMBER in words and variables.get("PACELINE_NODE") == str(node):
            return child.ppid() if agent else child.pid
    raise AssertionError(f"node {node} does not train")


def await_leg(
    process: subprocess.Popen[str], run: Path, holds: Callable[[Leg], bool], seconds: float = 240.0
) -> None:
    """Wait until something holds of a leg of the run."""
    end = time.monotonic() + seconds
    while not any(map(holds, read_legs(run / LEGS))):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "there was no such leg"
        time.sleep(0.02)


def kill_together(
    process: subprocess.Popen[str],
    run: Path,
    nodes: int,
    node: int,
    *,
    agent: bool = False,
    number: int = signal.SIGKILL,
) -> None:
    """Send a node a signal once all have made updates together; to stop it, its agent too."""
    await_leg(process, run, lambda leg: len(leg.plan.nodes) == nodes and leg.updates > 0)
    found = [member(process, node, agent=True)] if agent or number == signal.SIGSTOP else []
    if not agent:
        found.append(member(process, node))
    for each in found:
        os.kill(each, number)
