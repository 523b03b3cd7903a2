"""`ssh`: one connection per node, and what every engine that goes by ssh shares."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from paceline.config.environment import SECRET
from paceline.launch.engines import Command, Engine, Launch
from paceline.schema.hosts import Host
from paceline.secure.addresses import own_addresses, resolved
from paceline.text import user_path

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
    options += ["-p", str(host.port)] if host.port else []
    options += ["-i", str(user_path(host.key))] if host.key else []
    return ["ssh", *options, host.reach, f"exec {shlex.join(command)}"]


def ssh_config(hosts: Sequence[Host]) -> str:
    """What an ssh that somebody else calls must know of the hosts; empty where that is nothing.

    It is told addresses alone, and so neither users nor ports nor keys.
    """
    blocks = []
    for host in hosts:
        user = host.reach.rpartition("@")[0]
        key = f'"{user_path(host.key).absolute()}"' if host.key else None
        found = (("User", user), ("Port", host.port), ("IdentityFile", key))
        lines = [f"  {name} {value}\n" for name, value in found if value]
        if lines:
            blocks.append(f"Host {host.network_address}\n{''.join(lines)}")
    if not blocks:
        return ""
    return "".join(blocks) + "Match all\n  Include ~/.ssh/config\n  Include /etc/ssh/ssh_config\n"


def on_host(host: Host, label: str, words: list[str], launch: Launch) -> Command:
    """A command that finds the run's secret in its environment, by ssh where need be.

    Through ssh it comes as the first line of the input: neither end shows it to others.
    """
    if is_here(host.network_address):
        return Command(label=label, words=words, variables=launch.variables)
    told = f'IFS= read -r {SECRET} && export {SECRET} && exec "$@"'
    return Command(
        label=label,
        words=ssh_words(host, ["sh", "-c", told, "sh", *words]),
        told=f"{launch.secret}\n",
    )


def is_here(address: str) -> bool:
    """Whether an address is one of this machine's own interfaces."""
    return bool(resolved(address) & set(own_addresses()))


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
