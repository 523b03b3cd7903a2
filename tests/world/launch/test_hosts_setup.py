"""`paceline hosts setup` in the lab: a bare folder on another host becomes a ready environment.

The packages are those of the running Python (`--packages there`): torch alone has almost 1 GB. That
Paceline itself is installed, and not the source tree used, is checked.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.data.mnist import FILES
from paceline.lab import Lab
from paceline.lab.testing import make_lab

__all__ = ["make_lab"]
pytestmark = pytest.mark.lab
PACELINE = [sys.executable, "-m", "paceline.cli"]


def run(lab: Lab, *words: str) -> subprocess.CompletedProcess[bytes]:
    return lab.run([*PACELINE, *words], capture_output=True, timeout=600)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.slow
def test_a_bare_host_becomes_ready_and_stays_so(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    lab = make_lab("a", "b")
    here, there = tmp_path / "here", tmp_path / "b-data"
    (here / "mnist").mkdir(parents=True)
    for number, name in enumerate(FILES):
        (here / "mnist" / f"{name}.gz").write_bytes(bytes(number + 1))
    config = tmp_path / "digits.toml"
    config.write_text(f"[workload]\ndata = 'mnist'\n[data]\nroot = '{here}'\n")
    hosts = tmp_path / "hosts.toml"
    entry = "[data]\nlocation = 'copy'\n[[host]]\nname = 'b'\npython = '{}'\n"
    hosts.write_text(entry.format(sys.executable))
    target = tmp_path / "b-environment"
    words = ["hosts", "setup", str(hosts), "--packages", "there", "--config", str(config)]
    words += ["--target", str(tmp_path / "{host}-environment"), "--data-target", str(there)]

    before = files_below(tmp_path)
    done = run(lab, *words, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"-m venv {target}" in done.stdout.decode()
    assert f"{there}/mnist" in done.stdout.decode()
    assert files_below(tmp_path) == before

    done = run(lab, *words)
    assert done.returncode == 0, done.stderr
    assert b"1 host ready, 1 changed" in done.stdout
    assert f'python = "{target}/bin/python"' in done.stdout.decode()
    assert sorted(path.name for path in (there / "mnist").iterdir()) == sorted(
        f"{name}.gz" for name in FILES
    )
    assert not (target / "wheels").exists()
    where = "import paceline; print(paceline.__file__)"
    found = lab.run([str(target / "bin/python"), "-c", where], on="b", capture_output=True)
    assert found.stdout.decode().startswith(str(target))

    # As a user would go on: the environment's own Python is named, and nothing is left to do.
    hosts.write_text(entry.format(target / "bin/python"))
    before = files_below(there)
    done = run(lab, *words)
    assert done.returncode == 0, done.stderr
    assert b"b: " + str(target).encode() + b" is as it should be: nothing to do" in done.stdout
    assert b"1 host ready, 0 changed" in done.stdout
    assert b"copying" not in done.stdout
    assert files_below(there) == before

    # Data that differs is named and left alone.
    (there / "mnist" / f"{next(iter(FILES))}.gz").write_bytes(bytes(99))
    done = run(lab, *words)
    assert done.returncode == 2
    assert b"host b has other data than this machine" in done.stderr


def test_what_is_refused(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    lab = make_lab("a", "b")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("precious")
    words = ["hosts", "setup", "b,lost", "--packages", "there"]
    done = run(lab, *words, "--target", str(tmp_path / "{host}"))
    assert done.returncode == 2
    text = done.stderr.decode()
    assert f"{tmp_path}/b on host b holds something that is not ours" in text
    assert "host lost does not answer" in text
    assert "Traceback" not in text
    assert files_below(tmp_path / "b") == [str(tmp_path / "b" / "thesis.txt")]
