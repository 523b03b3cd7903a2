"""`lab clean` kills and removes by what it finds in /tmp: it trusts only its own user's notes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.lab import leftovers, supervisor

NOBODY = 65534
DEAD = 2**22 + 1
"""No process has this number: the kernel's largest is 2**22."""


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any lab."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bystander: subprocess.Popen[bytes]
) -> Path:
    """The directory of a dead lab whose notes point to the bystander."""
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path))
    group = tmp_path / "groups" / f"paceline-lab-{DEAD}-0"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text(f"{bystander.pid}\n")
    made = tmp_path / f"paceline-lab-{DEAD}-0-abcdef"
    made.mkdir()
    (made / "lock").touch()
    (made / "groups.json").write_text(json.dumps([str(group)]))
    return made


def test_a_list_of_groups_that_are_none_kills_nobody(
    state: Path, bystander: subprocess.Popen[bytes]
) -> None:
    assert supervisor.groups_of(str(state)) == []
    assert f"directory {state}" in leftovers.clean()
    assert bystander.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_root_leaves_alone_what_others_own(
    state: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GROUPS", str(state.parent))
    assert supervisor.groups_of(str(state)), "as its own user's the list would be gone by"
    for path in (state, *state.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    assert supervisor.groups_of(str(state)) == []
    assert leftovers.find_states() == []
    os.chown(state, 0, 0)  # a file that another user has put into a folder of ours
    assert supervisor.groups_of(str(state)) == []
    monkeypatch.setattr(supervisor, "GROUPS", "/sys/fs/cgroup")
    leftovers.clean()
    assert bystander.poll() is None


def test_links_are_not_followed(state: Path, tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "thesis.txt").write_text("irreplaceable")
    link = tmp_path / f"paceline-lab-{DEAD}-1-abcdef"
    link.symlink_to(treasure)
    note = state / "groups.json"
    note.rename(treasure / "groups.json")
    note.symlink_to(treasure / "groups.json")
    assert link not in leftovers.find_states()
    assert supervisor.groups_of(str(state)) == []
    leftovers.clean()
    assert (treasure / "thesis.txt").read_text() == "irreplaceable"
    shutil.rmtree(treasure)


@pytest.mark.parametrize("note", ["null", '{"a": 1}', "[1, null]", "[" * 3000, "\xff", '["/"]'])
def test_notes_that_are_damaged_name_no_group(state: Path, note: str) -> None:
    (state / "groups.json").write_text(note, encoding="latin-1")
    assert supervisor.groups_of(str(state)) == []
