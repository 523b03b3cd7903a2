"""hosts.toml: which machines train, and how each is reached."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from paceline.errors import ConfigError, shown
from paceline.schema.codec import rule
from paceline.text import is_one_line

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*")
"""What a host may be called: it goes into command lines of ssh, mpiexec and srun."""
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class HostDefaults:
    """What every host has that does not say otherwise."""

    slots: int = rule(default=1, minimum=1, maximum=4096)
    """Nodes that it is divided into: 1 starts its own local workers, more are started apart."""
    role: Literal["worker", "server"] = "worker"
    """"server" holds parameters for the exchange parameter_server and computes nothing."""
    interface: str | None = None
    """Network interface that the others reach it by; found by trying when left out."""
    python: str | None = None
    """Python that has Paceline there; the launcher's own path when left out."""
    user: str | None = None
    """Who ssh logs in as there; as ssh itself decides when left out."""
    port: int | None = rule(default=None, minimum=1, maximum=2**16 - 1)
    """Port of its ssh service, where it is not ssh's own."""
    key: str | None = None
    """File with the private key for it; as ssh itself decides when left out."""
    cores: int | None = rule(default=None, minimum=1, maximum=2**16)
    """Cores to use there; all visible ones when left out."""
    share: float | None = rule(default=None, minimum=0.0, maximum=1e9)
    """Part of every batch in proportion to the other hosts; measured when left out."""


@dataclass(frozen=True, kw_only=True)
class Host(HostDefaults):
    """One machine."""

    name: str
    """What messages, plans and reports call it."""
    address: str = ""
    """Name or number that ssh and the other hosts reach it by; its name when left out."""

    def __post_init__(self) -> None:
        for key, value in (("name", self.name), ("address", self.address or self.name)):
            if not _PLAIN.fullmatch(value):
                raise ConfigError(
                    f"host.{key} = {shown(value)} must be a host's plain name or address:"
                    " letters, digits and any of . _ : @ -"
                )
        if self.user is not None and not _USER.fullmatch(self.user):
            raise ConfigError(
                f"host.user = {shown(self.user)} must be a plain user name: letters, digits and any"
                " of . _ -"
            )
        if self.user is not None and "@" in self.address:
            raise ConfigError(
                f"host {self.name} has user = {shown(self.user)} and address ="
                f" {shown(self.address)}: name the user in one of them"
            )
        if self.key is not None and not is_one_line(self.key):
            raise ConfigError(f"host.key = {shown(self.key)} must be the path of a file")

    @property
    def reach(self) -> str:
        """Where ssh goes."""
        place = self.address or self.name
        return f"{self.user}@{place}" if self.user else place

    @property
    def network_address(self) -> str:
        """Where the other hosts connect to: without the user's name that ssh may need."""
        return self.reach.rpartition("@")[2]


@dataclass(frozen=True, kw_only=True)
class HostsData:
    """How the data comes to the hosts."""

    location: Literal["local", "shared", "copy"] = "local"
    """"local": each has its own; "shared": all see the same folder; "copy": setup sends it."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """All machines of a run, in the order in which their nodes are numbered."""

    host: tuple[Host, ...] = ()
    defaults: HostDefaults = field(default_factory=HostDefaults)
    data: HostsData = field(default_factory=HostsData)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for host in self.host:
            if host.name in seen:
                raise ConfigError(
                    f"host.name = {shown(host.name)} appears twice: give one entry `slots = 2`"
                    " instead"
                )
            seen.add(host.name)

    @property
    def workers(self) -> tuple[Host, ...]:
        return tuple(host for host in self.host if host.role == "worker")

    @property
    def in_order(self) -> tuple[Host, ...]:
        """Workers first: the first node talks to the user and writes what all share."""
        return (*self.workers, *(host for host in self.host if host.role == "server"))

    @property
    def places(self) -> tuple[NodePlace, ...]:
        """One place per node of the plan."""
        found: list[NodePlace] = []
        for host in self.in_order:
            for slot in range(host.slots):
                found.append(NodePlace(node=len(found), host=host, slot=slot))
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Where one node of the plan runs."""

    node: int
    host: Host
    slot: int = 0
    """Which part of the host's cores it has, of `host.slots`."""
