"""Which engine joins hosts when nobody says."""

from __future__ import annotations

import pytest

from paceline.api import HostsRequest
from paceline.config.hosts import find_hosts
from paceline.errors import UserError
from paceline.launch.inspection import Inspection
from paceline.workflow.spread import choose_engine


def found(*names: str) -> Inspection:
    return Inspection(facts={name: {"mpi": None} for name in names})


def test_names_of_one_machine_are_joined_without_mpi() -> None:
    hosts = find_hosts("localhost,127.0.0.1")
    facts = found("localhost", "127.0.0.1")
    assert choose_engine(HostsRequest(hosts=hosts), facts).name == "ssh"
    with pytest.raises(UserError, match=r"one machine, which mpiexec .* or use --engine ssh"):
        choose_engine(HostsRequest(hosts=hosts, engine="mpi"), facts)


def test_a_host_without_mpi_is_named() -> None:
    hosts = find_hosts("localhost")
    with pytest.raises(UserError, match=r"paceline\[mpi\]"):
        choose_engine(HostsRequest(hosts=hosts, engine="mpi"), found("localhost"))
