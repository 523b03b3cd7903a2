"""The package as others get it: built from a clean tree, installed where there is nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(*words: str, cwd: Path) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PACELINE"))}
    clean["PACELINE_CACHE"] = str(cwd / "cache")
    done = subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("package")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(
        ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    try:
        run(sys.executable, "-m", "build", "--outdir", "../dist", cwd=tree)
    except AssertionError as error:
        if "No matching distribution" in str(error):
            pytest.skip("setuptools cannot be fetched: no package index is reached from here")
        raise
    return folder / "dist"


def test_the_wheel_has_what_a_user_needs_and_no_more(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert wheel.name == f"paceline-{PROJECT['version']}-py3-none-any.whl"
    for needed in (
        "py.typed", "config/default.toml", "report/assets/page.css", "report/assets/charts.js",
    ):  # fmt: skip
        assert f"paceline/{needed}" in names
    assert {name.split("/")[0] for name in names} == {
        "paceline",
        f"paceline-{PROJECT['version']}.dist-info",
    }
    here = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "paceline").rglob("*.*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here - names == set(), "files that the package uses are not in the wheel"


def test_the_sdist_has_its_sources(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/paceline/py.typed"} <= names


def test_it_installs_into_an_empty_environment_and_trains(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "environment", with_pip=True)
    program = tmp_path / "environment" / "bin"
    pip = (str(program / "pip"), "install", "--quiet", "-c", str(ROOT / "constraints.txt"))
    run(*pip, "torch", cwd=tmp_path)
    run(*pip, str(wheel), cwd=tmp_path)
    said = run(str(program / "paceline"), "--version", cwd=tmp_path)
    assert said.strip() == f"paceline, version {PROJECT['version']}"
    run(str(program / "paceline"), "init", cwd=tmp_path)
    small = ("--set", "train.epochs=1", "--set", "local.strategy=sequential")
    run(str(program / "paceline"), "train", "paceline.toml", *small, cwd=tmp_path)
    assert (tmp_path / "runs" / "latest" / "run.json").exists()
    # What is for those who develop Paceline is not listed, and named as what it is.
    assert "experiment" not in run(str(program / "paceline"), "--help", cwd=tmp_path)
    refused = subprocess.run(
        [str(program / "paceline"), "experiment", "list"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "comes with Paceline's source" in refused.stderr
    # What is not installed is named with the line that installs it.
    refused = subprocess.run(
        [str(program / "paceline"), "watch"], cwd=tmp_path, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "pip install 'paceline[serve]'" in refused.stderr


def test_extras_are_of_packages_that_the_code_uses() -> None:
    extras = PROJECT["optional-dependencies"]
    assert all(extras.values()), "an extra without packages promises what is not there"
    merged = extras["all"][0].partition("[")[2].rstrip("]").split(",")
    assert set(merged) <= set(extras)
