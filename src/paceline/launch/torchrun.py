"""`torchrun`: one on each host, started by ssh; what it runs is the agent."""

from __future__ import annotations

import sys
from typing import Literal

from paceline.errors import UnsupportedError, unknown_name
from paceline.launch.engines import Command, Engine, Launch
from paceline.launch.ssh import on_host

RENDEZVOUS = ("static", "c10d")


class TorchrunEngine(Engine):
    """Hosts meet at a store of the first one: with fixed places, or in the order they come.

    Agents are told their node, so that both ways give the plan's order.
    """

    name = "torchrun"

    def __init__(self, rendezvous: str = "static") -> None:
        if rendezvous not in RENDEZVOUS:
            raise UnsupportedError(unknown_name("rendezvous", rendezvous, RENDEZVOUS))
        self.rendezvous: Literal["static", "c10d"] = "c10d" if rendezvous == "c10d" else "static"

    def command_lines(self, launch: Launch) -> list[Command]:
        commands = []
        first_node = 0
        for number, host in enumerate(launch.hosts):
            python = host.python or sys.executable
            words = [python, "-m", "torch.distributed.run", *self._meeting(launch, number)]
            words += ["--nnodes", str(len(launch.hosts)), "--nproc-per-node", str(host.slots)]
            _, *agent = launch.agent(host, "--first-node", str(first_node))
            commands.append(on_host(host, host.name, [*words, *agent], launch))
            first_node += host.slots
        return commands

    def _meeting(self, launch: Launch, number: int) -> list[str]:
        address = launch.hosts[0].network_address
        if self.rendezvous == "static":
            place = ["--master-addr", address, "--master-port", str(launch.store_port)]
            return ["--node-rank", str(number), *place]
        endpoint = f"{address}:{launch.store_port}"
        words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        return [*words, "--rdzv-id", f"paceline-{launch.port}"]
