"""A real Slurm on loopback: munged, slurmctld and slurmd of the test's own, with private state."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel")


def obstacle() -> str | None:
    """Why there can be no Slurm here, or None."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    for program in PROGRAMS:
        if shutil.which(program, path=path) is None:
            return f"{program} is not installed (Debian: apt-get install slurm-wlm munge)"
    return None if os.getuid() == 0 else "slurmd needs root"


class SlurmCluster:
    """One node that may run several tasks at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.name = socket.gethostname().partition(".")[0]
        self.environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin",
        }

    def start(self) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        (self.folder / "slurm.conf").write_text(self.configuration())
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        place = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        options = [f"--{name}-file={place[name]}" for name in ("pid", "log", "seed")]
        options.append(f"--socket={place['socket']}")
        self.daemon(["munged", "--foreground", "--force", f"--key-file={key}", *options])
        self.wait(place["socket"].exists)
        self.daemon(["slurmctld", "-D", "-f", str(self.folder / "slurm.conf")])
        self.daemon(["slurmd", "-D", "-N", self.name, "-f", str(self.folder / "slurm.conf")])
        self.wait(lambda: "idle" in self.run(["sinfo", "--noheader", "--format=%t"]))

    def configuration(self) -> str:
        folder = self.folder
        cores = len(os.sched_getaffinity(0))
        return f"""
ClusterName=test
SlurmctldHost={self.name}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName={self.name} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes={self.name} Default=YES MaxTime=10 State=UP OverSubscribe=FORCE:4
"""

    def daemon(self, words: list[str]) -> None:
        log = self.folder / f"{words[0]}.out"
        path = shutil.which(words[0], path=self.environment["PATH"])
        assert path is not None
        with log.open("wb") as output:
            process = subprocess.Popen(
                [path, *words[1:]],
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.processes.append(process)

    def run(self, words: list[str]) -> str:
        done = subprocess.run(
            words, env=os.environ | self.environment, capture_output=True, text=True, timeout=600
        )
        return done.stdout + done.stderr

    def wait(self, condition: object, seconds: float = 300.0) -> None:
        assert callable(condition)
        end = time.monotonic() + seconds
        while not condition():
            logs = {p.name: p.read_text()[-800:] for p in self.folder.glob("*.*o*") if p.is_file()}
            assert all(process.poll() is None for process in self.processes), logs
            assert time.monotonic() < end, logs
            time.sleep(0.05)

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(timeout=600)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=600)
