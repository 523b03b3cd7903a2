"""The command lines and scripts of every engine, against files that a person can read.

A change that is meant: `PACELINE_WRITE_GOLDEN=1 pytest tests/golden` writes them anew.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from paceline.config.environment import Allocation
from paceline.config.hosts import hosts_from
from paceline.launch import ssh
from paceline.launch.clusters.engine import RayEngine, SparkEngine
from paceline.launch.engines import Engine, Launch
from paceline.launch.mpi import MpiEngine, Mpiexec
from paceline.launch.slurm import SlurmEngine
from paceline.launch.ssh import SshEngine
from paceline.launch.torchrun import TorchrunEngine

HERE = Path(__file__).parent
ALIKE = [{"name": "a", "address": "10.0.0.1"}, {"name": "b", "address": "10.0.0.2", "slots": 2}]
UNLIKE = [{**ALIKE[0], "python": "/opt/one/python"}, {**ALIKE[1], "python": "/opt/two/python"}]
OPENMPI = Mpiexec(path="/usr/bin/mpiexec", kind="openmpi")
MPICH = Mpiexec(path="/usr/bin/mpiexec", kind="mpich")
ALLOCATED = Allocation(job="7", hosts=("n1", "n2"), tasks=3)

CASES: dict[str, tuple[Engine, list[dict[str, object]]]] = {
    "ssh": (SshEngine(), ALIKE),
    "torchrun-static": (TorchrunEngine(), ALIKE),
    "torchrun-c10d": (TorchrunEngine("c10d"), ALIKE),
    "mpi-openmpi": (MpiEngine(OPENMPI, root=False), ALIKE),
    "mpi-openmpi-two-pythons": (MpiEngine(OPENMPI, root=True), UNLIKE),
    "mpi-mpich": (MpiEngine(MPICH, root=False), ALIKE),
    "ray": (RayEngine("10.0.0.1:6379"), ALIKE),
    "spark": (SparkEngine("spark://10.0.0.1:7077"), ALIKE),
    "slurm-sbatch": (SlurmEngine(("--partition=short", "--time=60")), ALIKE),
    "slurm-srun": (SlurmEngine(("--exclusive",), allocation=ALLOCATED), ALIKE),
}


@pytest.mark.parametrize("name", CASES)
def test_command_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    monkeypatch.setattr(ssh, "is_here", lambda address: False)
    engine, hosts = CASES[name]
    launch = Launch(
        places=hosts_from({"host": hosts}).places,
        addresses=("10.0.0.9", "192.168.1.9"),
        port=4000,
        secret="secret00secret00",
        run=Path("/runs/one"),
        name="my run",
        network="10.0.0.0/24",
        interface="eth0",
    )
    text = ""
    for command in engine.command_lines(launch):
        text += f"$ {shlex.join(command.words)}\n"
        for file, content in command.files.items():
            text += f"--- {file}\n{content}"
    assert launch.secret not in text  # neither on a command line nor in a file
    golden = HERE / "launch" / f"{name}.txt"
    if os.environ.get("PACELINE_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
