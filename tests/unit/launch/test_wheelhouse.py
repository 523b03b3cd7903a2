"""What bare hosts are given: pinned packages, the wheels that hold them, Paceline packed."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from paceline.launch.wheelhouse import (
    by_index,
    download_commands,
    hashed_requirements,
    last_error,
    pack_paceline,
    running_packages,
    wheels_of,
)


def test_the_running_versions() -> None:
    found = dict(line.split("==") for line in running_packages())
    for name in ("torch", "numpy", "click", "sympy", "threadpoolctl"):
        assert found[name] == metadata.version(name)
    assert not {"paceline", "pytest", "mypy", "pip"} & set(found)


def test_builds_of_torch_have_an_index_of_their_own() -> None:
    cpu = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    both = ("numpy==2.4.6", "torch==2.13.0+cpu")
    assert by_index(both, None) == [([], [both[0]]), (cpu, [both[1]])]
    assert by_index(("torch==2.13.0",), None) == [([], ["torch==2.13.0"])]
    assert by_index(both, "file:///x") == [(["--index-url", "file:///x"], list(both))]


def test_wheels_are_found_by_name_and_version(tmp_path: Path) -> None:
    names = ("tomli_w-1.2.0-py3-none-any.whl", "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl")
    for name in (*names, "numpy-1.0-cp311-cp311-linux_x86_64.whl"):
        (tmp_path / name).touch()
    found, lacking = wheels_of(tmp_path, ("numpy==2.4.6", "tomli-w==1.2.0", "torch==2.13.0+cpu"))
    assert [path.name for path in found] == list(names)
    assert lacking == ["numpy==2.4.6"]
    (command,) = download_commands(tmp_path, lacking, None)
    assert command[-1] == "numpy==2.4.6"


def test_paceline_packed_is_a_true_wheel_and_equal_each_time(tmp_path: Path) -> None:
    first = pack_paceline(tmp_path).read_bytes()
    path = pack_paceline(tmp_path)
    assert path.read_bytes() == first
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        record = next(name for name in names if name.endswith("/RECORD"))
        lines = [line.rsplit(",", 2) for line in archive.read(record).decode().splitlines()]
        assert [line[0] for line in lines] == names
        for name, digest, size in lines[:-1]:
            data = archive.read(name)
            text = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={text}", str(len(data)))
    assert {"paceline/cli.py", "paceline/config/default.toml", "paceline/py.typed"} <= set(names)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "it said nothing"),
        ("a\nb\n", "b"),
        ("ERROR: no such thing\n[notice] new pip\n", "no such thing"),
    ],
)
def test_last_error(text: str, expected: str) -> None:
    assert last_error(text) == expected


def test_a_wheel_that_was_changed_on_the_way_is_not_installed(tmp_path: Path) -> None:
    sent, there = tmp_path / "sent", tmp_path / "the host"
    sent.mkdir()
    wheel = pack_paceline(sent)
    (there / "wheels").mkdir(parents=True)
    lines = hashed_requirements((wheel,), f"{there}/wheels")
    (there / "hashes.txt").write_text(lines)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--require-hashes", "--target", str(there / "site"), "-r", str(there / "hashes.txt")]
    shutil.copy(wheel, there / "wheels")
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (there / "site" / "paceline" / "cli.py").is_file()
    shutil.rmtree(there / "site")
    with (there / "wheels" / wheel.name).open("ab") as file:
        file.write(b"more")
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "HASH" in done.stderr
    assert not (there / "site").exists()
