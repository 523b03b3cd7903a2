"""What processes on an emulated host find: environment, hosts.toml, ssh."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from paceline.lab import mpiexec, probe, ssh
from paceline.lab.network import INTERFACE
from paceline.lab.spec import LabSpec

# What a login on a real host would set; nothing else of the caller's environment arrives there.
LOGIN_VARIABLES = ("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ")


def lab_variables(spec: LabSpec, state: Path, host: str, *, emulated: bool) -> dict[str, str]:
    """Variables that make launchers and transports use the lab's hosts and interface."""
    here = Path(sys.executable).parent
    variables = {
        "PATH": os.pathsep.join([str(state / "bin"), str(here), probe.search_path()]),
        "TMPDIR": str(state / "tmp" / host),
        "PACELINE_LAB": str(state),
        "PACELINE_LAB_HOST": host,
        "PACELINE_LAB_HOSTS": str(state / "hosts.toml"),
        "PRTE_MCA_plm_ssh_agent": str(state / "bin" / "ssh"),
        # The lab's cores are a few of the machine's: Open MPI would count and bind to them all.
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(state / "bin" / "ssh"),
    }
    if emulated:
        variables |= {
            "OMPI_MCA_btl_tcp_if_include": spec.network,
            "PRTE_MCA_prte_if_include": spec.network,
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": INTERFACE,
            "HYDRA_IFACE": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
        }
    else:
        # All ranks start here, and MPI refuses the loopback: it has to choose for itself.
        variables["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    variables |= {
        "GLOO_SOCKET_IFNAME": INTERFACE if emulated else "lo",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
    }
    return variables


def login_environment(spec: LabSpec, state: Path, host: str, *, emulated: bool) -> dict[str, str]:
    """The environment of a command that comes by ssh."""
    login = {name: os.environ[name] for name in LOGIN_VARIABLES if name in os.environ}
    return {"HOME": "/", **login, **lab_variables(spec, state, host, emulated=emulated)}


def caller_environment(spec: LabSpec, state: Path, host: str, *, emulated: bool) -> dict[str, str]:
    """The environment of a command that the lab itself starts: the caller's, and the lab's."""
    return {**os.environ, **lab_variables(spec, state, host, emulated=emulated)}


def hosts_toml(spec: LabSpec, addresses: dict[str, str], *, emulated: bool) -> str:
    """The file that `--hosts` reads."""
    lines = ["# Written by `paceline lab`: the hosts of this lab."]
    for host in spec.hosts:
        lines += [
            "",
            "[[host]]",
            f'name = "{host.name}"',
            f'address = "{addresses[host.name]}"',
            f"slots = {host.slots or host.visible_cores}",
            f'role = "{host.role}"',
            f'interface = "{INTERFACE if emulated else "lo"}"',
        ]
    return "\n".join(lines) + "\n"


def write_files(spec: LabSpec, state: Path, addresses: dict[str, str], *, emulated: bool) -> None:
    """Write hosts.toml, the name tables and the ssh stand-in."""
    (state / "hosts.toml").write_text(hosts_toml(spec, addresses, emulated=emulated))
    (state / "hosts.json").write_text(json.dumps(addresses))
    names = "".join(f"{address} {name}\n" for name, address in addresses.items())
    (state / "etc-hosts").write_text(f"127.0.0.1 localhost\n{names}")
    # A lab has no name server: say so at once, where the machine's own, out of reach from
    # here, would keep every unknown name waiting for seconds.
    (state / "etc-resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    for host in spec.hosts:
        (state / "tmp" / host.name).mkdir(parents=True)
        (state / f"{host.name}.hostname").write_text(f"{host.name}\n")
    (state / "bin").mkdir()
    _write_script(state / "bin" / "ssh", [str(ssh.__file__), str(state)])
    if not emulated:
        for name in ("mpiexec", "mpirun"):
            command = [str(mpiexec.__file__), str(state / "bin"), name]
            _write_script(state / "bin" / name, command)


def _write_script(path: Path, command: list[str]) -> None:
    words = shlex.join([sys.executable, "-I", "-S", *command])
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    path.chmod(0o755)
