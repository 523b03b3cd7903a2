"""`--hosts`: a file, names on the line, the lab's own, or a Slurm allocation's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.config.environment import lab_hosts
from paceline.errors import ConfigError, shown
from paceline.schema.codec import decode
from paceline.schema.hosts import Host, HostDefaults, Hosts
from paceline.schema.plain import parse_value, read_toml
from paceline.text import user_path

_RULE = "give a hosts.toml, names as --hosts a,b, or --hosts lab inside `paceline lab run`"


def find_hosts(text: str) -> Hosts:
    """What `--hosts TEXT` means.

    >>> [host.name for host in find_hosts("a,b:2").host]
    ['a', 'b']
    """
    if text == "lab":
        path = lab_hosts()
        if path is None:
            raise ConfigError(
                "--hosts lab works inside a lab only: paceline lab run LAB.toml -- paceline train"
                " ... --hosts lab"
            )
        return load_hosts(path)
    path = user_path(text)
    if text.endswith(".toml") or "/" in text or _is_file(path):
        return load_hosts(path)
    return hosts_from_names(text)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a list of many hosts is longer than a file's name may be
        return False


def hosts_from_names(text: str) -> Hosts:
    """Names or addresses with commas; `name:2` has two slots."""
    hosts: list[dict[str, Any]] = []
    for word in text.split(","):
        name, separator, slots = word.strip().rpartition(":")
        if not separator:
            hosts.append({"name": word.strip()})
        elif name and isinstance(count := parse_value(slots, "--hosts"), int):
            hosts.append({"name": name, "slots": count})
        else:
            raise ConfigError(f"--hosts {shown(text)}: {shown(word)} is not a host's name: {_RULE}")
    if not all(host["name"] for host in hosts):
        raise ConfigError(f"--hosts {shown(text)} has an empty name: {_RULE}")
    return hosts_from({"host": hosts})


def load_hosts(path: Path) -> Hosts:
    try:
        data = read_toml(path)
    except FileNotFoundError:
        raise ConfigError(f"--hosts {str(path)!r}: there is no such file: {_RULE}") from None
    try:
        return hosts_from(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def hosts_from(data: dict[str, Any]) -> Hosts:
    """Hosts from plain tables, with [defaults] filled in."""
    defaults = data.get("defaults", {})
    decode(HostDefaults, defaults, "defaults")
    entries = data.get("host", [])
    if isinstance(entries, list):
        entries = [{**defaults, **entry} if isinstance(entry, dict) else entry for entry in entries]
    hosts = decode(Hosts, {**data, "host": entries})
    if not hosts.workers:
        what = "only servers" if hosts.host else "no [[host]]"
        raise ConfigError(f'the hosts have {what}: at least one with role = "worker" must train')
    shares = [host for host in hosts.workers if host.share is not None]
    if shares and len(shares) < len(hosts.workers):
        without = next(host.name for host in hosts.workers if host.share is None)
        raise ConfigError(
            f"host {shares[0].name!r} has share = {shares[0].share:g} but {without!r} has none:"
            " give every worker a share, or none, so that they are measured"
        )
    if shares and not any(host.share for host in shares):
        raise ConfigError("every host has share = 0: at least one must take samples")
    return hosts


def numbered_hosts(count: int) -> Hosts:
    """Hosts that an engine chooses itself; their names are learnt when their agents come."""
    return Hosts(host=tuple(Host(name=f"node-{number}") for number in range(count)))
