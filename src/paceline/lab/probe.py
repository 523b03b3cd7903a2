"""What this machine can emulate, found by trying."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from paceline.lab import groups, supervisor
from paceline.lab.spec import LabSpec


def namespace_obstacle() -> str | None:
    """Why hosts cannot be network namespaces here, or None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root (run it with sudo)"
    for program in ("ip", "tc"):
        if find(program) is None:
            return f"the program {program!r} is missing (Debian: apt-get install iproute2)"
    code = (
        "import ctypes, os, subprocess, sys\n"
        f"if ctypes.CDLL(None, use_errno=True).unshare({supervisor.NAMESPACES}): sys.exit(3)\n"
        "make = 'ip link add br0 type bridge; ip link add v0 type veth peer name v1;'\n"
        "shape = 'tc qdisc add dev v0 root tbf rate 1mbit burst 5000 limit 9000'\n"
        "sys.exit(subprocess.run(['sh', '-ec', make + shape]).returncode and 4)\n"
    )
    tried = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": search_path()},
        check=False,
    )
    if tried.returncode == 3:
        return "the kernel does not let this process make namespaces"
    if tried.returncode:
        words = " ".join(tried.stderr.split()) or f"exit code {tried.returncode}"
        return f"the kernel lacks a bridge, veth or tbf ({words})"
    return None


def delay_obstacle() -> str | None:
    """Why links cannot be delayed here, or None when they can."""
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun is missing (modprobe tun)"
    return None


def group_obstacles() -> list[str]:
    """Limits that control groups cannot set here."""
    _, found = groups.find_controllers()
    words = {"cpu": "CPU quota", "memory": "memory limit"}
    return [
        f"{words[name]} (no control group {name!r} that we may write)"
        for name in words
        if name not in found
    ]


def overcommitted(spec: LabSpec) -> str | None:
    """One sentence when the hosts together have more cores than this machine."""
    available = len(os.sched_getaffinity(0))
    wanted = sum(host.cores for host in spec.hosts)
    if wanted <= available + 1e-9:
        return None
    return (
        f"the hosts have {wanted:g} cores together but this machine has {available}: they will"
        " take time from each other, so do not trust their speeds (lower host.*.cores)"
    )


def find(program: str) -> str | None:
    """Path of a program of the system."""
    return shutil.which(program, path=search_path())


def search_path() -> str:
    """PATH with the directories where iproute2 lies, which users often lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
