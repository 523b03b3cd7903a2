"""Installs a peer: a virtual environment of its own, PyTorch first, then Paceline's needs, then it.

An environment cannot be moved once it is made, so it is made where it will be used; what makes it
count is a record that is written last. Whatever ends an install early leaves none, and the next
one begins anew.
"""

from __future__ import annotations

import functools
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Protocol

from paceline.config.environment import child_environment
from paceline.errors import RunError, UnsupportedError
from paceline.schema import write_json
from studies.peers.environments import (
    RECORD,
    Peer,
    Record,
    find_peer,
    fingerprint,
    missing,
    peers_root,
    size_of,
)
from studies.peers.recipes import COMPILER, TORCH, TORCH_INDEX, Recipe
from studies.process import execute, step_lock

LIMIT_SECONDS = 2 * 3600.0
"""Of one step: Horovod's source takes 9 minutes on 2 quiet cores."""


class Show(Protocol):
    """Gets what pip said last, and the part of the install that is done."""

    def __call__(self, text: str, part: float) -> None: ...


@dataclass(frozen=True)
class Stage:
    """One step of an install; of several commands the first that succeeds counts."""

    title: str
    commands: tuple[tuple[str, ...], ...]
    compiled: bool = False


def install(
    name: str,
    *,
    again: bool = False,
    say: Callable[[str], None] = print,
    show: Show = lambda text, part: None,
) -> Peer:
    """Install a peer where it is not whole; `show` gets what pip said last and the part done."""
    peer = find_peer(name)
    if peer.recipe.build is not None and (lacking := missing(COMPILER)):
        words = ", ".join(f"{each.name} ({each.remedy})" for each in lacking)
        raise UnsupportedError(f"{name} is compiled here and needs {words}")
    peers_root().mkdir(parents=True, exist_ok=True)
    lock = peers_root() / f".{name}"
    lock.mkdir(exist_ok=True)
    with step_lock(lock) as held:
        peer = find_peer(name)  # another process may just have finished it
        if peer.installed and not again:
            return peer
        began = time.monotonic()
        if peer.folder.exists():
            (peer.folder / RECORD).unlink(missing_ok=True)  # first: half a folder must not count
            shutil.rmtree(peer.folder)
        log = peers_root() / f"{name}.log"
        log.write_text("")
        stages = stages_of(peer.recipe, peer.folder)
        for number, stage in enumerate(stages):
            say(f"{name} [{number + 1}/{len(stages)}] {stage.title}")
            part = number / len(stages)
            run_stage(peer, stage, log, held, functools.partial(show, part=part))
        record = Record(
            recipe=fingerprint(peer.recipe),
            python=platform.python_version(),
            packages=packages_in(peer),
            bytes=size_of(peer.folder),
            seconds=round(time.monotonic() - began, 1),
            when=datetime.now().strftime("%Y-%m-%d %H:%M"),
        )
        write_json(peer.folder / RECORD, record)
    return find_peer(name)


def remove(name: str) -> int:
    """Delete a peer's environment; gives the bytes that it took."""
    peer = find_peer(name)
    if not peer.folder.exists():
        return 0
    lock = peers_root() / f".{name}"
    lock.mkdir(exist_ok=True)
    with step_lock(lock):
        size = size_of(peer.folder)
        (peer.folder / RECORD).unlink(missing_ok=True)
        shutil.rmtree(peer.folder)
    return size


def stages_of(of: Recipe, folder: Path) -> list[Stage]:
    """The commands that install a peer, in order."""
    python = str(folder / "bin" / "python")
    pip = (python, "-m", "pip", "install", "--progress-bar", "off")
    torch = f"torch=={TORCH}"
    own = [each for each in own_requirements() if name_of(each) not in of.loosened]
    loose = [name_of(each) for each in own_requirements() if name_of(each) in of.loosened]
    packages = (*own, *loose, torch, *of.with_packages)
    stages = [
        Stage("virtual environment", ((sys.executable, "-m", "venv", str(folder)),)),
        # The local version first: where an index or a folder of the user's has it, nothing is
        # fetched from PyTorch's; and never the build with CUDA.
        Stage(
            f"PyTorch {TORCH} without CUDA",
            ((*pip, f"{torch}+cpu"), (*pip, "--index-url", TORCH_INDEX, torch)),
        ),
    ]
    if of.build is None:
        stages.append(Stage(of.requirement, ((*pip, *packages, of.requirement),)))
    else:
        stages += [
            Stage("what the build needs", ((*pip, *packages, *of.build.packages),)),
            # Not from pip's cache: a wheel there may be of another PyTorch.
            Stage(
                f"{of.requirement}, compiled (about {of.minutes:.0f} minutes on 2 quiet cores)",
                ((*pip, "--no-build-isolation", "--no-cache-dir", of.requirement),),
                compiled=True,
            ),
        ]
    check = f"import {of.module}; print('imported')"
    stages.append(Stage(f"import {of.module}", ((python, "-c", check),)))
    return stages


def own_requirements() -> list[str]:
    """What Paceline itself needs besides PyTorch, in the versions that are here.

    A peer's program reads the configuration, the data and the model by Paceline's own code.
    """
    found = []
    for line in metadata.requires("paceline") or []:
        if "extra ==" not in line and name_of(line) != "torch":
            found.append(f"{name_of(line)}=={metadata.version(name_of(line))}")
    return found


def name_of(requirement: str) -> str:
    """The package that a requirement names.

    >>> name_of("ray[train]==2.60.0"), name_of("numpy>=1.26"), name_of("wheel")
    ('ray', 'numpy', 'wheel')
    """
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return match[0]


def run_stage(peer: Peer, stage: Stage, log: Path, held: int, show: Callable[[str], None]) -> None:
    """Run a stage to its end, or say which line of its output tells why it failed."""
    changes = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONNOUSERSITE": "1", "PYTHONPATH": ""}
    if stage.compiled and peer.recipe.build is not None:
        binaries = str(peer.folder / "bin")
        path = child_environment({}).get("PATH", "")
        changes |= {
            **peer.recipe.build.environment,
            "CXX": str(compiler(peer)),
            "PATH": f"{binaries}:{path}",
        }
    for command in stage.commands:
        with log.open("a") as said:
            said.write(f"$ {' '.join(command)}\n")
        start = log.stat().st_size
        code = execute(
            command,
            output=log,
            printed=None,
            keep=held,
            limit=LIMIT_SECONDS,
            environment=child_environment(changes),
            tick=lambda: show(last_words(log)),
        )
        if code == 0:
            return
    with log.open(errors="replace") as said:
        said.seek(start)
        why = reason(said.read())
    raise RunError(
        f"{peer.recipe.name} could not be installed, its step {stage.title!r} failed: {why};"
        f" all that was said is in {log}, and `{peer.remedy}` tries again"
    )


def compiler(peer: Peer) -> Path:
    """A C++ compiler that takes the standard asked for, whatever the build's own files say."""
    assert peer.recipe.build is not None
    path = peer.folder / "compiler" / "c++"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec g++ "$@" -std={peer.recipe.build.standard}\n')
    path.chmod(0o755)
    return path


def last_words(log: Path) -> str:
    """The last line that pip said, for the screen."""
    with log.open("rb") as said:
        said.seek(max(0, log.stat().st_size - 4096))
        lines = said.read().decode(errors="replace").splitlines()
    told = [line.strip() for line in lines if line.strip() and "WARNING" not in line]
    return told[-1] if told else ""


def reason(text: str) -> str:
    """The line of an output that says why: pip's error, else the last one.

    >>> reason("Collecting x\\nERROR: No matching distribution found for x\\nbye")
    'No matching distribution found for x'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1]


def packages_in(peer: Peer) -> dict[str, str]:
    """Name and version of everything in an environment."""
    command: Sequence[str] = (str(peer.python), "-m", "pip", "list", "--format", "json")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=child_environment({"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": ""}),
    )
    return {each["name"]: each["version"] for each in json.loads(done.stdout)}
