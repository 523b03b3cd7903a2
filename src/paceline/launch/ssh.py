"""`ssh`: one connection per node, and what every engine that goes by ssh shares."""

from __future__ import annotations

import contextlib
import shlex
import socket

from paceline.config.environment import TOKEN
from paceline.launch.engines import Command, Engine, Launch
from paceline.schema.hosts import Host

OPTIONS = (
    # No one is there to answer a question, and a dead link must show.
    ("BatchMode", "yes"),
    ("ConnectTimeout", "10"),
    ("ServerAliveInterval", "5"),
    ("ServerAliveCountMax", "3"),
)


def ssh_words(host: Host, command: list[str]) -> list[str]:
    """The command on a host; on this machine itself, the command alone."""
    if is_here(host.network_address):
        return command
    options = [word for name, value in OPTIONS for word in ("-o", f"{name}={value}")]
    return ["ssh", *options, host.reach, f"exec {shlex.join(command)}"]


def on_host(host: Host, label: str, words: list[str], launch: Launch) -> Command:
    """A command that finds the launcher's token in its environment, by ssh where need be.

    Through ssh the token comes as the first line of the input: neither end shows it to others.
    """
    if is_here(host.network_address):
        return Command(label=label, words=words, variables=launch.secret)
    told = f'IFS= read -r {TOKEN} && export {TOKEN} && exec "$@"'
    return Command(
        label=label,
        words=ssh_words(host, ["sh", "-c", told, "sh", *words]),
        first_line=launch.token,
    )


def is_here(address: str) -> bool:
    """Whether an address is one of this machine's own interfaces."""
    import psutil

    with contextlib.suppress(OSError):
        found = {entry[4][0] for entry in socket.getaddrinfo(address, None, socket.AF_INET)}
        own = {
            entry.address
            for entries in psutil.net_if_addrs().values()
            for entry in entries
            if entry.family == socket.AF_INET
        }
        return bool(found & own)
    return False


class SshEngine(Engine):
    """Starts each agent by an ssh of its own; nothing else is needed on the hosts."""

    name = "ssh"

    def command_lines(self, launch: Launch) -> list[Command]:
        return [
            on_host(
                place.host,
                f"{place.host.name}-{place.node}",
                launch.agent(place.host, "--node", str(place.node)),
                launch,
            )
            for place in launch.places
        ]
