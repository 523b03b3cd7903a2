"""What hosts and launchers say of themselves, where a word of it is missing or makes no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.launch.agent import Agent
from paceline.launch.inspection import inspect_hosts
from paceline.schema.hosts import Host

HOST = """#!/bin/sh
echo '{}'
read -r peers
echo '{{"reached": {{}}}}'
"""


def test_a_host_that_says_nothing_of_mpi_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = {
        "host": "a", "versions": {}, "cores": 1, "usable": 1, "physical": 1, "devices": 0,
        "memory_mb": 9, "time": 1.0, "data": "none", "sources": {}, "port": 7, "free_port": 8,
    }  # fmt: skip
    ssh = tmp_path / "ssh"
    ssh.write_text(HOST.format(json.dumps(facts)))
    ssh.chmod(0o755)
    found = inspect_hosts((Host(name="a", address="far.example"),), {})
    assert not found.failures
    assert found.facts["a"]["mpi"] is None
    assert found.mpi() is None


@pytest.mark.parametrize(
    "words",
    [
        {"slots": 0, "slot": 0}, {"slots": 2, "slot": 2}, {"slots": 2, "slot": -1},
        {"slots": 1, "slot": 0, "cores": 0}, {"slots": 1, "slot": 0, "cores": -2},
    ],
)  # fmt: skip
def test_an_agent_takes_no_place_that_there_is_not(words: dict[str, int]) -> None:
    agent = Agent.__new__(Agent)
    with pytest.raises(ValueError, match="this is slot"):
        agent.on_welcome({"kind": "welcome", **words})
