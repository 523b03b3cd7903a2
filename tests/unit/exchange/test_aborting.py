"""A wait for a node that is silent ends when another thread ends it, whoever has left before."""

from __future__ import annotations

import os
import subprocess
import sys

from ports import free_port

from paceline.config.environment import rank_environment
from paceline.schema import RankContext

NODE = """
import sys, threading, torch
from paceline.config.environment import rank_context
from paceline.errors import PacelineError
from paceline.exchange.opening import open_network
from paceline.launch.rank import leave
context = rank_context()
network = open_network(context, "abc", deadline=600)
network.barrier("the start")
if context.node < 2:
    sys.stdin.readline()
    leave(0)
silent = network.receive(torch.empty(1), 1)
gone = network.receive(torch.empty(1), 0)
print("waits", flush=True)
try:
    gone.wait()
except PacelineError:
    threading.Timer(0.0, network.abort).start()
try:
    silent.wait()
except PacelineError:
    print("ended", flush=True)
leave(0)
"""


def test_a_wait_ends_though_the_next_node_has_left() -> None:
    port, nodes = free_port(), []
    for node in range(3):
        context = RankContext(node=node, nodes=3, address="127.0.0.1", port=port, backend="gloo")
        nodes.append(
            subprocess.Popen(
                [sys.executable, "-c", NODE],
                env=os.environ | rank_environment(context),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        assert nodes[2].stdout is not None
        assert nodes[2].stdout.readline() == "waits\n"
        nodes[0].communicate("go\n", timeout=300)
        assert nodes[2].communicate(timeout=300)[0] == "ended\n"
        nodes[1].communicate("go\n", timeout=300)
    finally:
        for process in nodes:
            process.kill()
            process.communicate()
