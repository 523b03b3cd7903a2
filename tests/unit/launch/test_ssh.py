"""How hosts are reached: users, ports and keys, for our own ssh and for that of MPI."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.errors import ConfigError, UserError
from paceline.launch.engines import Launch
from paceline.launch.mpi import SSH_CONFIG, MpiEngine, Mpiexec
from paceline.launch.ssh import ssh_config, ssh_words
from paceline.schema.hosts import Host, Hosts

A = Host(name="a", address="10.9.0.1", user="ada", port=2222, key="/keys/cluster")
B = Host(name="b", address="bob@10.9.0.2")
C = Host(name="c", address="10.9.0.3")


def test_our_own_ssh_is_told_on_its_line() -> None:
    words = ssh_words(A, ["hostname"])
    assert words[-6:] == ["-p", "2222", "-i", "/keys/cluster", "ada@10.9.0.1", "exec hostname"]
    assert ssh_words(B, ["hostname"])[-2] == "bob@10.9.0.2"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here")
def test_the_ssh_of_mpi_reads_a_file(tmp_path: Path) -> None:
    """As OpenSSH itself understands it; it knows nothing but addresses."""
    file = tmp_path / "ssh-config"
    file.write_text(ssh_config([A, B, C]))

    def asked(address: str) -> dict[str, str]:
        words = ["ssh", "-G", "-F", str(file), address]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)

    first, second, third = (asked(f"10.9.0.{number}") for number in (1, 2, 3))
    assert (first["user"], first["port"]) == ("ada", "2222")
    assert first["identityfile"] == "/keys/cluster"
    assert (second["user"], second["port"]) == ("bob", "22")
    assert third["user"] not in ("ada", "bob")
    assert ssh_config([C]) == ""


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_mpi_hands_the_file_to_ssh(kind: str, tmp_path: Path) -> None:
    engine = MpiEngine(Mpiexec(path="/usr/bin/mpiexec", kind=kind), root=False)  # type: ignore[arg-type]

    def command(run: Path, *hosts: Host):
        places = Hosts(host=hosts).places
        launch = Launch(places=places, addresses=("10.9.0.9",), port=5, secret="s", run=run)
        return engine.command_lines(launch)[0]

    made = command(tmp_path, A, C)
    assert made.files[SSH_CONFIG] == ssh_config([A, C])
    told = [*made.words, *made.variables.values()]
    assert f"-F {tmp_path / SSH_CONFIG}" in told
    assert "ada" not in made.files["hostfile"]
    assert SSH_CONFIG not in command(tmp_path, C).files
    with pytest.raises(UserError, match="because of its spaces"):
        command(tmp_path / "my runs", A)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"user": "-oProxyCommand=x"}, "must be a plain user name"),
        ({"user": "ada", "address": "bob@10.9.0.1"}, "name the user in one of them"),
        ({"key": "a\nb"}, "must be the path of a file"),
    ],
)
def test_what_ssh_would_misread_is_refused(fields: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Host(name="a", **fields)  # type: ignore[arg-type]
