"""Starts the agents of a lab and clears everything away when the lab ends, however it ends.

The supervisor watches two things: a pipe whose other end only the lab holds, and
the lab's process itself. Whichever goes first, even by `kill -9`, it kills the
agents (with them everything on their hosts, and so their namespaces and links),
removes the control groups and the directory of the lab, and exits. Should the
supervisor be killed, the kernel kills the agents.

Run by path with the standard library alone: import nothing of Paceline here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import stat
import sys
import time
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x20000000,
    0x40000000,
)
GROUPS = "/sys/fs/cgroup"
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def start_agent(script: str, config_path: str, namespaces: bool) -> tuple[int, int]:
    """Start one agent; returns our child to wait for and the agent's process id.

    A process cannot enter a new process namespace itself, only its next child
    can: hence one process between us and the agent, which just waits.
    """
    report_read, report_write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child:
        os.close(report_write)
        report = os.read(report_read, 64).decode()
        os.close(report_read)
        if not report.isdecimal():
            os.waitpid(child, 0)
            raise OSError(0, report or "the process that makes namespaces was killed")
        return child, int(report)
    try:
        die_with_parent()
        libc = ctypes.CDLL(None, use_errno=True)
        if namespaces and libc.unshare(NAMESPACES):
            os.write(report_write, f"unshare: {os.strerror(ctypes.get_errno())}".encode())
            os._exit(1)
        # Without a process namespace, what an agent leaves when it dies falls to us.
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        agent = os.fork()
        if agent == 0:
            die_with_parent()
            # Away from the terminal: Ctrl-C is for the lab, which decides what ends when.
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(nothing, 1)
            os.execv(sys.executable, [sys.executable, "-I", "-S", script, config_path])
        os.write(report_write, str(agent).encode())
        os.close(report_write)
        for descriptor in (0, 1):
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
    finally:
        os._exit(0)


def remove_groups(groups: list[str], seconds: float = 10.0) -> list[str]:
    """Kill what is left in control groups and remove them; returns those that stayed."""
    deadline = time.monotonic() + seconds
    left = [group for group in reversed(groups) if os.path.isdir(group)]  # noqa: PTH112
    while left:
        for group in left:
            _kill_group(group)
            with contextlib.suppress(OSError):
                os.rmdir(group)  # noqa: PTH106
        left = [group for group in left if os.path.isdir(group)]  # noqa: PTH112
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def _kill_group(group: str) -> None:
    with contextlib.suppress(OSError):
        with open(f"{group}/cgroup.procs") as file:  # noqa: PTH123
            pids = [int(line) for line in file]
        for pid in pids:
            if pid > 1 and pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def is_ours(path: str) -> bool:
    """True for a directory of this very user, not a link to one: in /tmp anyone may make others."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def groups_of(state: str) -> list[str]:
    """The control groups that a lab has noted down; only such as bear its name and are ours.

    Whoever kills by a list must not take it from anybody, nor for anything but this lab's.
    """
    try:
        note = os.open(f"{state}/groups.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(note) as file:  # noqa: PTH123
            if not is_ours(state) or os.fstat(note).st_uid != os.geteuid():
                return []
            noted = json.load(file)
    except (OSError, ValueError, RecursionError):
        return []
    lab = os.path.basename(state).rpartition("-")[0]  # noqa: PTH119
    return [
        group
        for group in (noted if isinstance(noted, list) else [])
        if isinstance(group, str)
        and group.startswith(f"{GROUPS}/")
        and lab in group.split("/")[-2:]
        and os.path.realpath(group) == os.path.normpath(group)
        and is_ours(group)
    ]


def clear(state: str) -> list[str]:
    """Remove what a lab with this directory left: its groups, then the directory."""
    left = remove_groups(groups_of(state))
    if not left:
        shutil.rmtree(state, ignore_errors=True)
    return left


def end_agents(children: list[int], agents: list[int], namespaces: bool) -> None:
    """Kill every agent and wait until it is gone."""
    doomed = agents if namespaces else [pid for child in children for pid in descendants(child)]
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            # Stopped while its descendants were counted: it is to reap them now.
            os.kill(child, signal.SIGCONT)
            os.waitpid(child, 0)


def descendants(pid: int) -> list[int]:
    """Children of a process and theirs; stopped first, so that none is born meanwhile."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with open(f"/proc/{pid}/task/{thread}/children") as file:  # noqa: PTH123
                for child in file.read().split():
                    found += [int(child), *descendants(int(child))]
    return found


def main(config_path: str) -> None:
    """Start agents, say so, and wait for the end of the lab."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    with open(config_path) as file:  # noqa: PTH123
        config: dict[str, Any] = json.load(file)
    lab = os.pidfd_open(config["lab"])
    children: list[int] = []
    agents: dict[str, int] = {}
    try:
        for name, path in config["agents"].items():
            child, agents[name] = start_agent(config["script"], path, config["namespaces"])
            children.append(child)
        os.write(1, json.dumps(agents).encode() + b"\n")
    except OSError as error:
        os.write(1, json.dumps({"error": error.strerror}).encode() + b"\n")
    # Nothing is ever written into the pipe: readable means that its other end is closed.
    select.select([0, lab], [], [])
    end_agents(children, list(agents.values()), config["namespaces"])
    clear(config["state"])


if __name__ == "__main__":
    main(sys.argv[1])
