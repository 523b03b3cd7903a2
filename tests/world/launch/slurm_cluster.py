"""A real Slurm in a lab: a login host with slurmctld, and two hosts with a slurmd each.

Hosts are network namespaces of their own. munged, slurmctld and slurmd are the test's own, with
private state.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL

from paceline.lab import Lab
from paceline.lab.process import LabProcess

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "squeue", "scancel")
LOGIN = "login"
NODES = ("n1", "n2")
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def obstacle() -> str | None:
    """Why there can be no Slurm here, or None."""
    for program in PROGRAMS:
        if shutil.which(program, path=_PATH) is None:
            return f"{program} is not installed (Debian: apt-get install slurm-wlm munge)"
    return None if os.getuid() == 0 else "slurmd needs root"


class SlurmCluster:
    """Two nodes, each of which may run several tasks at once."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        self.folder, self.lab = folder, lab
        self.processes: list[LabProcess] = []
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        (self.folder / "slurm.conf").write_text(self.configuration())
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        place = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        options = [f"--{name}-file={place[name]}" for name in ("pid", "log", "seed")]
        options.append(f"--socket={place['socket']}")
        self.daemon(LOGIN, ["munged", "--foreground", "--force", f"--key-file={key}", *options])
        self.wait(place["socket"].exists)
        self.daemon(LOGIN, ["slurmctld", "-D", "-f", str(self.folder / "slurm.conf")])
        for node in NODES:
            self.daemon(node, ["slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf")])
        self.wait_for_nodes("idle")

    def wait_for_nodes(self, state: str) -> None:
        """Until Slurm calls every node so."""
        asked = ["sinfo", "--noheader", "--Node", "--format=%t"]
        self.wait(lambda: self.run(asked)[1].split() == [state] * len(NODES))

    def configuration(self) -> str:
        folder, address = self.folder, self.lab.addresses
        nodes = "\n".join(
            f"NodeName={node} NodeAddr={address[node]} CPUs=2 State=UNKNOWN" for node in NODES
        )
        return f"""
ClusterName=test
SlurmctldHost={LOGIN}({address[LOGIN]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
{nodes}
PartitionName=all Nodes={",".join(NODES)} Default=YES MaxTime=30 State=UP
"""

    def daemon(self, host: str, words: list[str]) -> None:
        path = shutil.which(words[0], path=_PATH)
        assert path is not None
        with (self.folder / f"{words[0]}-{host}.out").open("wb") as output:
            process = self.lab.start(
                [path, *words[1:]],
                on=host,
                env=self.environment,
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.processes.append(process)

    def run(self, words: list[str], *, on: str = LOGIN) -> tuple[int, str]:
        """A command on a host to its end: its exit code, and what it has printed."""
        done = self.lab.run(words, on=on, env=self.environment, capture_output=True, timeout=600)
        return done.returncode, (done.stdout + done.stderr).decode(errors="replace")

    def wait(self, condition: Callable[[], bool], seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert all(process.poll() is None for process in self.processes), self.logs()
            assert time.monotonic() < end, self.logs()
            time.sleep(0.05)

    def logs(self) -> dict[str, str]:
        """What the daemons have said last."""
        files = (*self.folder.glob("*.log"), *self.folder.glob("*.out"))
        return {path.name: path.read_text(errors="replace")[-800:] for path in files}

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(600)
            process.close()
