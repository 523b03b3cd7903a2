"""Hosts that are reached by a real sshd and share no run directory with the launcher.

Host b of a lab runs OpenSSH's server in a mount namespace of its own in which the folder of runs
is empty: what it writes there stays there, so everything must travel over the control channel.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline
from paceline.lab import Lab
from paceline.lab.testing import make_lab
from paceline.launch.carry import is_used

__all__ = ["make_lab"]
SSHD = shutil.which("sshd") or next(
    (str(path) for path in [Path("/usr/sbin/sshd")] if path.exists()), None
)
pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.skipif(SSHD is None, reason="no sshd here: apt-get install openssh-server"),
]
SETTINGS = {
    "workload.model": "shallow_cnn",
    "workload.data": "synthetic",
    "workload.batch_size": 32,
    "data.options": "{ shape = [1, 28, 28], samples = 640, test_samples = 32 }",
    "local.strategy": "threads",
    "local.threads": 1,
    "exchange.rebalance": "false",
    "train.deterministic": "true",
}


class RealSsh:
    """A lab of a and b, where b has a real sshd and a has a real ssh that knows the way."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.runs = folder / "runs"
        self.run = self.runs / "run"
        self.runs.mkdir()
        for name in ("host", "user"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True, timeout=600)
        (folder / "sshd.conf").write_text(
            f"Port 2222\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
            "PermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile none\n"
            # The package under test, also where another one is installed.
            f"SetEnv PYTHONPATH={Path(paceline.__file__).parents[1]}\n"
        )
        (folder / "ssh.conf").write_text(
            f"Host *\n  Port 2222\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
            f"  StrictHostKeyChecking accept-new\n  UserKnownHostsFile {folder}/known\n"
        )
        (folder / "bin").mkdir()
        self.ssh = folder / "bin" / "ssh"
        self.ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh.conf "$@"\n')
        self.ssh.chmod(0o755)
        self.hosts = folder / "hosts.toml"
        self.hosts.write_text(
            "".join(f'[[host]]\nname = "{n}"\naddress = "{lab.addresses[n]}"\n' for n in "ba")
        )
        Path("/run/sshd").mkdir(exist_ok=True)  # where its privilege separation lives
        steps = [
            f"mount -t tmpfs none {self.runs}",
            # What the login scripts of this machine do is not what is tested here.
            "for f in ~/.bashrc ~/.profile; do test ! -e $f || mount --bind /dev/null $f; done",
            f"exec {SSHD} -D -e -f {folder}/sshd.conf",
        ]
        serve = " && ".join(steps)
        with (folder / "sshd.log").open("wb") as log:
            self.server = lab.start(["unshare", "-m", "sh", "-c", serve], on="b", stderr=log)

    def command(self, engine: str, *more: str) -> list[str]:
        words = ["train", "--hosts", str(self.hosts), "--engine", engine]
        return [sys.executable, "-m", "paceline.cli", *words, "--run", str(self.run), *more]

    def train(self, engine: str, *more: str, stop_after: str = "", off: bool = False) -> str:
        """Train on b and a to the end, or until it has said something; what it said.

        It is then stopped by Ctrl-C, or loses b as if that was switched off.
        """
        path = f"{self.ssh.parent}:/usr/local/bin:/usr/bin:/bin:{Path(sys.executable).parent}"
        variables = {
            "PATH": path,
            "PACELINE_CACHE": str(self.folder / "cache"),
            "PRTE_MCA_plm_ssh_agent": str(self.ssh),
        }
        log = self.folder / "log"
        with log.open("wb") as output:
            command = self.command(engine, *more)
            process = self.lab.start(
                command,
                on="a",
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            end = time.monotonic() + 300
            while stop_after and stop_after not in log.read_text():
                assert process.poll() is None, log.read_text() + self.server_said()
                assert time.monotonic() < end, log.read_text() + self.server_said()
                time.sleep(0.05)
            if off:
                while not (self.run / "checkpoints" / "latest").exists():
                    assert process.poll() is None, log.read_text() + self.server_said()
                    assert time.monotonic() < end, log.read_text() + self.server_said()
                    time.sleep(0.05)
                self.lab.cut("b")
            elif stop_after:
                process.send_signal(signal.SIGINT)
            code = process.wait(timeout=600)
        expected = 1 if off else 130 if stop_after else 0
        assert code == expected, log.read_text() + self.server_said()
        return log.read_text()

    def server_said(self) -> str:
        return (self.folder / "sshd.log").read_text()

    def epochs(self) -> list[int]:
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["epoch"] for line in lines]


@pytest.fixture
def real(make_lab: Callable[..., Lab], tmp_path: Path) -> RealSsh:
    lab = make_lab({"name": "a", "cores": 1.0}, {"name": "b", "cores": 1.0}, rate="1gbit")
    made = RealSsh(lab, tmp_path)
    end = time.monotonic() + 300
    while "listening" not in (tmp_path / "sshd.log").read_text():
        assert made.server.poll() is None, (tmp_path / "sshd.log").read_text()
        assert time.monotonic() < end
        time.sleep(0.05)
    return made


def asked(epochs: int) -> list[str]:
    settings = SETTINGS | {"train.epochs": epochs}
    return [word for pair in settings.items() for word in ("--set", f"{pair[0]}={pair[1]}")]


def test_files_come_back_and_training_goes_on_from_them(real: RealSsh) -> None:
    """Rank 0 is on b, which cannot see the run: all that it wrote is in the run at the end."""
    said = real.train("ssh", *asked(6), stop_after="epoch 2/6")
    assert "2 nodes by ssh, over gloo" in said
    assert 2 <= len(real.epochs()) < 6
    assert (real.run / "checkpoints" / "latest" / "model.safetensors").stat().st_size > 1000
    before = {rank: (real.run / f"rank-{rank}" / "events.jsonl").read_bytes() for rank in (0, 1)}
    assert all(before.values())

    real.train("ssh", "--resume")
    assert real.epochs() == [1, 2, 3, 4, 5, 6]
    assert json.loads((real.run / "run.json").read_text())["finished"]
    for rank, past in before.items():
        now = (real.run / f"rank-{rank}" / "events.jsonl").read_bytes()
        assert now.startswith(past)
        assert len(now) > len(past)
    assert list((real.folder / "cache" / "runs").iterdir()) == []


def test_a_host_that_is_switched_off_costs_nothing_that_has_come(real: RealSsh) -> None:
    """b, which writes everything, is gone: the launcher has its checkpoints, b has the rest."""
    never_again = ("--set", "train.restarts=0")
    said = real.train("ssh", *asked(20), *never_again, stop_after="epoch 3/20", off=True)
    folders = real.folder / "cache" / "runs"
    (folder,) = [path for path in folders.iterdir() if "-0-" in path.name]
    assert f"what host b wrote last stays there in {folder}" in said
    epochs = real.epochs()
    assert epochs == list(range(1, len(epochs) + 1)) != []
    assert (real.run / "checkpoints" / "latest" / "model.safetensors").stat().st_size > 1000
    end = time.monotonic() + 300
    while is_used(folder):  # its agent ends when it sees that the launcher is gone
        assert time.monotonic() < end
        time.sleep(0.1)
    real.lab.restore("b")
    said = real.train("ssh", "--resume")
    assert "continuing" in said
    assert "epoch 1/20" not in said
    assert real.epochs() == list(range(1, 21))
    assert list(folders.iterdir()) == []


@pytest.mark.parametrize("engine", ["torchrun", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_every_engine_goes_by_it(real: RealSsh, engine: str) -> None:
    assert f"2 nodes by {engine}" in real.train(engine, *asked(1))
    assert real.epochs() == [1]


def test_a_script_runs_on_both(real: RealSsh) -> None:
    """b has the script but not the run: its log comes back. Without the script it is refused."""
    path = f"{real.ssh.parent}:/usr/local/bin:/usr/bin:/bin"
    variables = {"PATH": path, "PACELINE_CACHE": str(real.folder / "cache")}
    odd = Path(__file__).parent / "odd_ranks.py"

    def run(script: Path, mode: str) -> tuple[int, str]:
        words = ["run", "--hosts", str(real.hosts), "--nproc", "1", "--run", str(real.run)]
        done = real.lab.run(
            [sys.executable, "-m", "paceline.cli", *words, str(script), mode],
            on="a",
            env=variables,
            capture_output=True,
            timeout=600,
        )
        return done.returncode, done.stdout.decode() + done.stderr.decode()

    hidden = real.runs / "odd_ranks.py"  # a folder that b sees empty
    shutil.copy(odd, hidden)
    code, said = run(hidden, "tell")
    assert code == 2, said
    assert f"host b does not have {hidden}: copy it there, at the same path" in said
    assert not real.run.exists()
    code, said = run(odd, "tell")
    assert code == 0, said + real.server_said()
    assert "[b rank 0] {" in said
    assert "[a rank 1] {" in said
    rank = json.loads((real.run / "rank-0" / "output.log").read_text())["variables"]
    assert rank["MASTER_ADDR"] == real.lab.addresses["b"]
    assert rank["GLOO_SOCKET_IFNAME"] not in ("", "lo")
    shutil.rmtree(real.run)
    code, said = run(odd, "kill")
    assert code == 137, said
    assert "a rank 1 failed first: it was killed by SIGKILL" in said
