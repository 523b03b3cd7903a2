"""Measures what a lab really gives: link rate, round trip, CPU quota, cost of the delay relay.

sudo python examples/lab/measure_lab.py
"""

from __future__ import annotations

import json
import subprocess
import sys

from paceline.lab import Lab, LabSpec

SERVER = """
import socket, sys
server = socket.create_server(("", 7000))
print("ready", flush=True)
connection, _ = server.accept()
while True:
    wanted = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
    if not wanted:
        break
    while wanted:
        wanted -= len(connection.recv(min(wanted, 1 << 20)))
    connection.sendall(b"!")
"""
CLIENT = """
import json, socket, sys, time
connection = socket.create_connection(("b", 7000))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def send(size):
    start = time.monotonic()
    connection.sendall(size.to_bytes(8, "big") + bytes(size))
    assert connection.recv(1) == b"!"
    return time.monotonic() - start
round_trips = sorted(send(1) for _ in range(21))
print(json.dumps({"round_trip": round_trips[10], "seconds": send(int(sys.argv[1]))}))
"""
BURN = """
import time
start = time.monotonic()
while time.monotonic() < start + 2: pass
print(time.process_time() / (time.monotonic() - start))
"""
PYTHON = [sys.executable, "-I", "-S", "-c"]


def measure_link(rate: str, size: int, delay: str | None) -> None:
    """Print one row: goodput, round trip and the relay's CPU time."""
    link = {"rate": rate} | ({"delay": delay} if delay else {})
    spec = LabSpec.from_tables({"host": [{"name": "a"}, {"name": "b"}], "link": link})
    with Lab(spec) as lab:
        server = lab.start([*PYTHON, SERVER], on="b", stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        output = lab.run([*PYTHON, CLIENT, str(size)], capture_output=True, check=True).stdout
        found = json.loads(output)
        relay = lab.relay_seconds()
        server.close()
    share = "-" if relay is None else f"{relay / found['seconds']:.2f}"
    print(
        f"| {rate} | {delay or '-'} | {size * 8 / found['seconds'] / 1e6:.0f} |"
        f" {found['round_trip'] * 1000:.2f} | {share} |",
        flush=True,
    )


def measure_quota(cores: float) -> None:
    """Print one row: the part of a core that a busy loop got."""
    spec = LabSpec.from_tables({"host": [{"name": "a", "cores": cores}]})
    with Lab(spec) as lab:
        got = float(lab.run([*PYTHON, BURN], capture_output=True, check=True).stdout)
    print(f"| {cores:g} | {got:.3f} |", flush=True)


def main() -> None:
    """Print both tables."""
    print("| rate | delay | Mbit/s got | round trip ms | cores used by the relay |")
    print("|---|---|---|---|---|")
    for rate, size in (("10mbit", 2_000_000), ("100mbit", 20_000_000), ("1gbit", 200_000_000)):
        for delay in (None, "1ms", "10ms"):
            measure_link(rate, size, delay)
    print("\n| cores | CPU time per second |\n|---|---|")
    for cores in (0.1, 0.2, 0.5, 0.8):
        measure_quota(cores)


if __name__ == "__main__":
    main()
