"""Delays frames between pairs of TAP interfaces, for kernels without netem.

`relay.py HOST:SWITCH:SECONDS ...` joins the file descriptors HOST and SWITCH of
each pair: what the host sends waits the given time, what it receives passes at
once. Frames keep the header that tells the kernel how to segment and sum them,
so one read moves up to 64 KB.

Run by path with the standard library alone: import nothing of Paceline here.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections import deque

FRAME = 70_000  # the largest segmented frame and its header
READS_PER_TURN = 64


class Cable:
    """One host's cable: a FIFO of frames that are still under way."""

    def __init__(self, host: int, switch: int, delay: float) -> None:
        self.host, self.switch, self.delay = host, switch, delay
        self.under_way: deque[tuple[float, bytes]] = deque()
        self.alive = True

    def read(self, source: int) -> None:
        """Take what has arrived at one end."""
        for _ in range(READS_PER_TURN):
            try:
                frame = os.read(source, FRAME)
            except BlockingIOError:
                return
            except OSError:
                # The host is gone, and its interface with it.
                self.alive = False
                return
            if source == self.host:
                self.under_way.append((time.monotonic() + self.delay, frame))
            else:
                self.write(self.host, frame)

    def deliver(self, now: float) -> None:
        """Hand over every frame whose time has come."""
        while self.under_way and self.under_way[0][0] <= now:
            self.write(self.switch, self.under_way.popleft()[1])

    def write(self, target: int, frame: bytes) -> None:
        try:
            os.write(target, frame)
        except OSError:
            # A real cable drops frames too: interface down, or queue full.
            return


def main(arguments: list[str]) -> None:
    """Move frames until killed, or until no wire is left."""
    wires = []
    for text in arguments:
        host, switch, delay = text.split(":")
        wires.append(Cable(int(host), int(switch), float(delay)))
    while wires:
        ends = {end: wire for wire in wires for end in (wire.host, wire.switch)}
        due = min((wire.under_way[0][0] for wire in wires if wire.under_way), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        ready, _, _ = select.select(list(ends), [], [], wait)
        for end in ready:
            ends[end].read(end)
        now = time.monotonic()
        for wire in wires:
            wire.deliver(now)
        wires = [wire for wire in wires if wire.alive]


if __name__ == "__main__":
    main(sys.argv[1:])
