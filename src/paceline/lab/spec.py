"""What a lab is: hosts, their link, and the faults that befall them.

    [link]
    rate = "1gbit"
    [[host]]
    name = "a"
    cores = 1.0
    [[fault]]
    at = "10s"
    kind = "cut"
    host = "a"

Every key is described by the docstring under its field.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import ConfigError, shortened, shown, unknown_name
from paceline.schema import units
from paceline.schema.plain import parse_value, read_toml

FAULT_KINDS: dict[str, str] = {
    "kill": "the host falls silent and all its processes are gone, as when the power fails",
    "shutdown": "all its processes are killed; peers see their connections close",
    "cut": "its link carries nothing, in silence",
    "restore": "its link works again, at the rate it was given first",
    "throttle": "its link gets another rate",
    "slow": "its cores do what fewer of them would",
    "pause": "its processes are stopped (SIGSTOP)",
    "resume": "its processes go on (SIGCONT)",
}
ROLES = ("worker", "server")
LEAST_CORES = 0.01
"""What a host can have at least."""
# What a host may be called: a DNS label that also fits into an interface name.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,11}[a-z0-9])?")
Section = TypeVar("Section")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """The link that every host has to the one switch, unless the host says otherwise."""

    rate: str | None = None
    """Bits per second in each direction, e.g. "100mbit"; without it, as fast as the kernel."""

    delay: str | None = None
    """Time added to every frame that a host sends, e.g. "5ms": a ping takes twice that."""

    def __post_init__(self) -> None:
        _check_link(self.rate, self.delay, "link")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSpec:
    """One host of the lab."""

    name: str
    """Its host name: lower-case letters, digits and dashes, at most 13."""

    cores: float = 1.0
    """CPU time it may use, in cores: 2, or 0.5 for half a core (a CPU quota)."""

    visible: int | None = None
    """Cores it sees; by default `cores` rounded up. 2 visible with cores = 1.0 is half quota."""

    memory: str | None = None
    """Memory limit, e.g. "2gb"; without it, what the machine has."""

    rate: str | None = None
    """Rate of its own link; by default that of `[link]`."""

    delay: str | None = None
    """Delay of its own link; by default that of `[link]`."""

    slots: int | None = None
    """Processes a launcher may start on it; by default the cores it sees."""

    role: str = "worker"
    """What it is for in hosts.toml: "worker" or "server"."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"host name {shown(self.name)} must be 1 to 13 lower-case letters, digits and inner"
                ' dashes, for example "node-1"'
            )
        key = f"host.{self.name}"
        if not _is_number(self.cores) or not 0.01 <= self.cores <= 4096:
            raise ConfigError(
                f"{key}.cores = {shown(self.cores)} must be a number from 0.01, for example 0.5"
            )
        _check_count(self.visible, f"{key}.visible")
        _check_count(self.slots, f"{key}.slots")
        if self.visible is not None and self.visible < self.cores:
            raise ConfigError(
                f"{key}.visible = {self.visible} must be at least its cores ({self.cores:g}):"
                " a host cannot use more cores than it sees"
            )
        if self.memory is not None and units.size(self.memory, f"{key}.memory") < 2**24:
            raise ConfigError(
                f'{key}.memory = {shown(self.memory)} must be at least "16mib",'
                " or Python cannot start"
            )
        if self.role not in ROLES:
            raise ConfigError(unknown_name(f"{key}.role", str(self.role), ROLES))
        _check_link(self.rate, self.delay, key)

    @property
    def visible_cores(self) -> int:
        """Cores that processes on this host see."""
        return self.visible if self.visible is not None else max(1, math.ceil(self.cores))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultSpec:
    """Something that goes wrong (or right again) at a given time."""

    at: str
    """Time after the start of the command, e.g. "10s"."""

    kind: str
    """One of kill, shutdown, cut, restore, throttle, slow, pause, resume."""

    host: str
    """The host it happens to."""

    rate: str | None = None
    """The new rate, for kind = "throttle"."""

    cores: float | None = None
    """Cores' worth of time that are left, for kind = "slow"."""

    process: str | None = None
    """For pause and resume: only processes whose command line contains this text."""

    def __post_init__(self) -> None:
        units.duration(self.at, "fault.at")
        if self.kind not in FAULT_KINDS:
            raise ConfigError(unknown_name("fault.kind", str(self.kind), FAULT_KINDS))
        if (self.kind == "throttle") != (self.rate is not None):
            raise ConfigError(
                'fault.rate belongs to kind = "throttle" and only there, but kind is'
                f" {shown(self.kind)} and rate is {shown(self.rate)}"
            )
        if (self.kind == "slow") != (self.cores is not None):
            raise ConfigError(
                'fault.cores belongs to kind = "slow" and only there, but kind is'
                f" {shown(self.kind)} and cores is {shown(self.cores)}"
            )
        if self.cores is not None:
            number = isinstance(self.cores, int | float) and not isinstance(self.cores, bool)
            if not number or not LEAST_CORES <= self.cores < math.inf:
                raise ConfigError(
                    f"fault.cores = {shown(self.cores)} must be a number from {LEAST_CORES:g}"
                )
        if self.rate is not None:
            units.rate(self.rate, "fault.rate")
        if self.process is not None and self.kind not in ("pause", "resume"):
            raise ConfigError(
                f"fault.process = {shown(self.process)} belongs to pause and resume,"
                f" not {shown(self.kind)}"
            )

    @property
    def seconds(self) -> float:
        """Time after the start of the command."""
        return units.duration(self.at)

    def __str__(self) -> str:
        detail = self.rate or (f"processes with {shown(self.process)}" if self.process else "")
        return " ".join(part for part in (self.kind, self.host, detail) if part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabSpec:
    """A cluster on one machine."""

    hosts: tuple[HostSpec, ...]
    """The hosts, `[[host]]` in the file; the command runs on the first."""

    link: LinkSpec = dataclasses.field(default_factory=LinkSpec)
    """The link of each host to the switch."""

    faults: tuple[FaultSpec, ...] = ()
    """What goes wrong and when, `[[fault]]` in the file."""

    network: str = "10.77.0.0/24"
    """Addresses of the hosts; they exist only inside the lab."""

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not names:
            raise ConfigError("a lab needs at least one [[host]] with a name")
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"host {name!r} is there {names.count(name)} times: rename one")
        for fault in self.faults:
            if fault.host not in names:
                raise ConfigError(unknown_name("fault.host", str(fault.host), names))
        room = self._network().num_addresses - 3
        if len(names) > room:
            raise ConfigError(
                f"network {shown(self.network)} has room for {room} hosts, not {len(names)}:"
                ' give a larger one, for example "10.77.0.0/16"'
            )

    def _network(self) -> ipaddress.IPv4Network:
        try:
            if not isinstance(self.network, str):
                raise TypeError("it is no text")
            return ipaddress.IPv4Network(self.network)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"network = {shown(self.network)} must be an IPv4 network in CIDR form, for example"
                f' "10.77.0.0/24" ({shortened(str(error))})'
            ) from error

    @property
    def addresses(self) -> dict[str, str]:
        """Host name to address, in the order of the file."""
        network = self._network()
        return {host.name: str(network[index + 1]) for index, host in enumerate(self.hosts)}

    @property
    def prefix_length(self) -> int:
        """The network's prefix length, e.g. 24."""
        return self._network().prefixlen

    def host(self, name: str) -> HostSpec:
        for host in self.hosts:
            if host.name == name:
                return host
        raise ConfigError(unknown_name("host", name, [host.name for host in self.hosts]))

    def rate_of(self, name: str) -> float | None:
        """Bits per second of a host's link; None when it is not shaped."""
        text = self.host(name).rate or self.link.rate
        return units.rate(text) if text else None

    def delay_of(self, name: str) -> float:
        """Seconds added to each frame the host sends."""
        text = self.host(name).delay or self.link.delay
        return units.duration(text) if text else 0.0

    @classmethod
    def load(cls, path: str | Path, changes: Iterable[str] = ()) -> LabSpec:
        """Read a lab file; `changes` are `key=value` texts, as `--set` takes them.

        >>> LabSpec.load("examples/lab/two-hosts.toml", ["link.rate=100mbit"])  # doctest: +SKIP
        """
        try:
            tables = read_toml(Path(path))
        except FileNotFoundError as error:
            raise ConfigError(
                f"cannot read the lab file {str(path)!r}: {error.strerror}"
            ) from error
        return cls.from_tables(tables, changes)

    @classmethod
    def from_tables(cls, tables: dict[str, Any], changes: Iterable[str] = ()) -> LabSpec:
        """Build a lab from the tables of its file, with changes as `--set` takes them.

        >>> LabSpec.from_tables({"host": [{"name": "a"}]}).addresses
        {'a': '10.77.0.1'}
        """
        for change in changes:
            _apply(tables, change)
        for key in tables:
            if key not in ("network", "link", "host", "fault"):
                raise ConfigError(unknown_name("key", key, ("network", "link", "host", "fault")))
        return cls(
            hosts=tuple(_section(HostSpec, table, "host") for table in _list(tables, "host")),
            link=_section(LinkSpec, _link(tables), "link"),
            faults=tuple(_section(FaultSpec, table, "fault") for table in _list(tables, "fault")),
            network=tables.get("network", "10.77.0.0/24"),
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_count(value: object, key: str) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{key} = {shown(value)} must be a whole number from 1")


def _check_link(rate: str | None, delay: str | None, key: str) -> None:
    if rate is not None:
        units.rate(rate, f"{key}.rate")
    if delay is not None and units.duration(delay, f"{key}.delay") > 10:
        raise ConfigError(f'{key}.delay = {shown(delay)} must be at most "10s"')


def _link(tables: Mapping[str, Any]) -> dict[str, Any]:
    link = tables.get("link", {})
    if not isinstance(link, dict):
        raise ConfigError(f"link = {shown(link)} must be a table: [link] with rate and delay")
    return link


def _list(tables: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = tables.get(key, [])
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise ConfigError(f"{key} must be a list of tables: write [[{key}]] with two brackets")
    return value


def _section(kind: type[Section], table: Mapping[str, Any], key: str) -> Section:
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in table:
        if name not in fields:
            raise ConfigError(unknown_name(f"key of {key}", name, fields))
        if isinstance(table[name], list | dict):
            raise ConfigError(f"{key}.{name} = {shown(table[name])} must be one text or number")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING
        if required and name not in table:
            raise ConfigError(f"a {key} needs the key {shown(name)}")
    return kind(**table)


def _apply(tables: dict[str, Any], change: str) -> None:
    """Change one key: `link.rate=100mbit`, `host.b.cores=0.5`, `host.*.memory=2gb`."""
    key, equals, text = change.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(
            f"--set {shown(change)} must be key=value, for example link.rate=100mbit or"
            " host.b.cores=0.5"
        )
    value = parse_value(text.strip(), f"--set {key.strip()} =")
    if path[0] in ("host", "fault") and len(path) == 3:
        for table in _chosen(_list(tables, path[0]), path[0], path[1]):
            table[path[2]] = value
    elif path[0] == "link" and len(path) == 2:
        tables["link"] = {**_link(tables), path[1]: value}
    elif path == ["network"]:
        tables["network"] = value
    else:
        valid = ("network", "link.KEY", "host.NAME.KEY", "host.*.KEY", "fault.NUMBER.KEY")
        raise ConfigError(unknown_name("key", key.strip(), valid))


def _chosen(tables: list[dict[str, Any]], kind: str, which: str) -> list[dict[str, Any]]:
    if which == "*":
        return tables
    if kind == "host":
        names = {str(table.get("name")): table for table in tables}
    else:
        names = {str(index): table for index, table in enumerate(tables)}
    if which not in names:
        raise ConfigError(unknown_name(kind, which, names))
    return [names[which]]
