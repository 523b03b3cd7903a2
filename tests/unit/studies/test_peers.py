"""Peers: recipes that hold together, and environments that count only when they are whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, RunError
from paceline.schema import write_json
from studies.peers import environments, install
from studies.peers.environments import RECORD, Record, find_peer, fingerprint
from studies.peers.recipes import RECIPES, TORCH, names, recipe
from studies.running import Work, command_of, peer_python, peer_root
from studies.spec import StudyStep

ROOT = Path(__file__).parents[3]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return tmp_path


def run_cli(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def pretend(name: str, **changes: Any) -> Path:
    """An environment as an install that came to its end leaves it."""
    folder = environments.peers_root() / name
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    packages = {recipe(name).package: recipe(name).version, "torch": f"{TORCH}+cpu"}
    facts: dict[str, Any] = {
        "recipe": fingerprint(recipe(name)),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "packages": packages,
        "bytes": 1_200_000_000,
        "seconds": 60.0,
        "when": "2026-11-18 12:00",
    }
    write_json(folder / RECORD, Record(**facts | changes))
    return folder


def test_every_recipe_has_a_program_and_pins_everything() -> None:
    for each in RECIPES:
        assert peer_root(each.name) == ROOT
        pinned = [*each.with_packages, *(each.build.packages if each.build else ())]
        assert all("==" in package for package in pinned), each.name
        assert each.requirement.endswith(f"=={each.version}")
    assert len({fingerprint(each) for each in RECIPES}) == len(RECIPES)


def test_torch_comes_first_and_without_cuda() -> None:
    for each in RECIPES:
        stages = install.stages_of(each, Path("/somewhere"))
        for command in stages[1].commands:
            assert command[-1].startswith(f"torch=={TORCH}")
            assert command[-1].endswith("+cpu") or install.TORCH_INDEX in command
        later = [word for stage in stages[2:] for line in stage.commands for word in line]
        assert f"torch=={TORCH}" in later  # nothing may bring another
        assert each.requirement in later


def test_own_requirements_are_those_of_here_without_torch() -> None:
    found = install.own_requirements()
    assert {install.name_of(each) for each in found} >= {"numpy", "click", "safetensors"}
    assert "torch" not in {install.name_of(each) for each in found}
    assert all("==" in each for each in found)


def test_what_was_interrupted_is_not_taken_for_whole(cache: Path) -> None:
    folder = pretend("ray")
    assert find_peer("ray").ready
    (folder / RECORD).write_text('{"recipe": "half')
    assert not find_peer("ray").installed
    (folder / RECORD).unlink()
    assert not find_peer("ray").installed
    assert find_peer("ray").remedy == "paceline peers install ray"


@pytest.mark.parametrize("change", [{"recipe": "another"}, {"python": "2.7.18"}])
def test_an_environment_of_another_recipe_or_python_is_outdated(
    cache: Path, change: dict[str, str]
) -> None:
    pretend("lightning", **change)
    peer = find_peer("lightning")
    assert (peer.outdated, peer.installed) == (True, False)
    assert peer.remedy == "paceline peers install lightning"


def test_spark_without_java_is_there_but_not_ready(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend("spark")
    monkeypatch.setenv("PATH", str(cache))
    peer = find_peer("spark")
    assert (peer.installed, peer.ready) == (True, False)
    assert peer.remedy == "apt-get install openjdk-17-jre-headless"


def test_the_list_says_what_is_here_and_what_is_missing(cache: Path) -> None:
    pretend("accelerate")
    told = json.loads(run_cli("peers", "--json").stdout)
    assert [row["name"] for row in told["peers"]] == list(names())
    rows = {row["name"]: row for row in told["peers"]}
    assert rows["accelerate"]["ready"]
    assert rows["accelerate"]["version"] == recipe("accelerate").version
    assert rows["accelerate"]["bytes"] == 1_200_000_000
    assert rows["horovod"]["remedy"] == "paceline peers install horovod"
    text = run_cli("peers").stdout
    assert "1.2 GB" in text
    absent = [name for name in names() if name != "accelerate"]
    assert f"paceline peers install {' '.join(absent)}\n" in text


def test_steps_of_a_study_run_in_the_environment_of_their_peer(cache: Path) -> None:
    assert peer_python("ray") == sys.executable  # which then says how to install it
    folder = pretend("ray")
    step = StudyStep(name="x", kind="peer", peer="ray", processes=2, threads=1)
    words = command_of(Work(step=step, out=cache))
    assert words[0] == str(folder / "bin" / "python")
    assert words[-4:] == ["--processes", "2", "--threads", "1"]


def test_a_wrong_name_is_refused_before_anything_is_fetched(cache: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'horovod'"):
        recipe("horvod")
    done = run_cli("peers", "install", "accelerate", "horvod")
    assert done.returncode == 2
    assert not (cache / "peers" / "accelerate").exists()


def test_removed_is_gone(cache: Path) -> None:
    folder = pretend("deepspeed")
    assert run_cli("peers", "remove", "deepspeed").stdout.startswith("deepspeed: ")
    assert not folder.exists()
    assert run_cli("peers", "remove", "deepspeed").stdout == "deepspeed: was not here\n"


def test_a_failed_install_says_why_and_leaves_nothing_that_counts(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip finds nothing, without a network
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(RunError, match=r"PyTorch 2.13.0 without CUDA.*No matching distribution"):
        install.install("accelerate", say=lambda line: None)
    assert not find_peer("accelerate").installed
    assert (cache / "peers" / "accelerate").exists()  # begun anew by the next try


@pytest.mark.slow
def test_the_smallest_peer_installs_and_trains(cache: Path, tmp_path: Path) -> None:
    done = run_cli("peers", "install", "accelerate")
    if "No matching distribution" in done.stderr or "ConnectionError" in done.stderr:
        pytest.skip("no index of packages can be reached from here")
    assert done.returncode == 0, done.stderr
    assert find_peer("accelerate").ready
    again = run_cli("peers", "install", "accelerate")
    assert "[1/4]" not in again.stderr  # it is there
    out = tmp_path / "beside"
    command = [sys.executable, "-m", "benchmarks.beside", "--size", "small", "--place", "one"]
    command += ["--rounds", "1", "--only", "accelerate", "--out", str(out)]
    trained = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    (table,) = json.loads((out / "beside.json").read_text())["tables"]
    rows = [row for row in table["rows"] if row["system"] == "accelerate"]
    assert len(rows) >= 1
    assert all(row["losses"] < 1e-4 for row in rows)
