"""The lab's switch and links: `ip` and `tc` commands, each run where it belongs.

Every interface is made inside the namespace of the switch or of a host, never
in the machine's own, so its routes and interfaces are untouched.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from paceline.schema.units import rate_text

BRIDGE = "br0"
INTERFACE = "eth0"
FRAME_BYTES = 1514
BURST_SECONDS = 0.001
QUEUE_SECONDS = 0.1
LEAST_QUEUE_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """What went through a host's interface."""

    bytes_sent: int = 0
    """Bytes that left the host, headers included."""

    bytes_received: int = 0
    """Bytes that arrived."""

    packets_sent: int = 0
    """Frames that left; one segmented by the interface counts once."""

    packets_received: int = 0
    """Frames that arrived."""

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            **{
                field.name: getattr(self, field.name) - getattr(earlier, field.name)
                for field in dataclasses.fields(self)
            }
        )


def port(host: str) -> str:
    """Name of the switch's port to a host."""
    return f"p-{host}"


def switch() -> list[list[str]]:
    """Commands in the switch's namespace that make the bridge."""
    return [
        ["ip", "link", "add", BRIDGE, "type", "bridge", "stp_state", "0", "forward_delay", "0"],
        ["ip", "link", "set", BRIDGE, "up"],
    ]


def wire(host: str, *, make: bool) -> list[list[str]]:
    """Commands in the switch's namespace that give it a port to a host.

    With `make`, a veth pair is made, its other end in the namespace that file
    descriptor 3 stands for; without, the port exists already.
    """
    veth = ["ip", "link", "add", port(host), "type", "veth"]
    far_end = ["peer", "name", INTERFACE, "netns", "/proc/self/fd/3"]
    return [
        *([[*veth, *far_end]] if make else []),
        ["ip", "link", "set", port(host), "master", BRIDGE],
        ["ip", "link", "set", port(host), "up"],
    ]


def address(text: str, prefix_length: int) -> list[list[str]]:
    """Commands in the host's namespace that bring its interfaces up."""
    return [
        ["ip", "link", "set", "lo", "up"],
        ["ip", "address", "add", f"{text}/{prefix_length}", "dev", INTERFACE],
        ["ip", "link", "set", INTERFACE, "up"],
    ]


def in_order(interface: str, cores: int) -> list[str]:
    """The command that keeps the packets of a connection in order.

    Which core takes a packet from a veth is chance, and two cores overtake each other: TCP takes
    that for loss and slows down (300 Mbit/s between four hosts: half of it). Receive steering
    gives every connection one core.

    >>> in_order("eth0", 34)[-1]
    'echo 3,ffffffff > /sys/class/net/eth0/queues/rx-0/rps_cpus'
    """
    left, words = (1 << cores) - 1, []
    while left:
        words.append(f"{left & 0xFFFFFFFF:x}" if left < 2**32 else f"{left & 0xFFFFFFFF:08x}")
        left >>= 32
    mask = ",".join(reversed(words))
    return ["sh", "-c", f"echo {mask} > /sys/class/net/{interface}/queues/rx-0/rps_cpus"]


def few_packets(interface: str, bits_per_second: float) -> list[str]:
    """The command that lets an interface send pieces that its shaper need not cut up.

    What is larger than a burst, the shaper cuts into frames of 1,500 bytes, and the machine's cores
    are then busy with packets: four hosts at 300 Mbit/s got half of it.
    """
    size = max(2 * FRAME_BYTES, min(65536, int(0.9 * _burst(bits_per_second / 8))))
    return ["ip", "link", "set", "dev", interface, "gso_max_size", str(size)]


def shape(interface: str, bits_per_second: float) -> list[str]:
    """The command that limits what an interface sends.

    A burst of one millisecond keeps small messages honest: with the usual 64 KB
    they would cross a slow link in no time.
    """
    bytes_per_second = bits_per_second / 8
    burst = _burst(bytes_per_second)
    limit = max(LEAST_QUEUE_BYTES, int(bytes_per_second * QUEUE_SECONDS))
    return [
        *("tc", "qdisc", "replace", "dev", interface, "root", "tbf"),
        *("rate", f"{round(bits_per_second)}bit", "burst", str(burst), "limit", str(limit)),
    ]


def _burst(bytes_per_second: float) -> int:
    return max(3 * FRAME_BYTES, int(bytes_per_second * BURST_SECONDS))


def unshape(interface: str) -> list[str]:
    """The command that lifts the limit."""
    return ["tc", "qdisc", "del", "dev", interface, "root"]


def cut(host: str) -> list[str]:
    """Take the port off the bridge: nothing passes and neither end is told."""
    return ["ip", "link", "set", port(host), "nomaster"]


def restore(host: str) -> list[str]:
    """Put the port back."""
    return ["ip", "link", "set", port(host), "master", BRIDGE]


def read_counters(pid: int, interface: str = INTERFACE) -> Counters:
    """Counters of an interface in the namespace of a process; OSError when that is gone."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            values = [int(number) for number in numbers.split()]
            return Counters(
                bytes_received=values[0],
                packets_received=values[1],
                bytes_sent=values[8],
                packets_sent=values[9],
            )
    raise FileNotFoundError(f"no interface {interface} in the namespace of process {pid}")


def describe(bits_per_second: float | None, delay: float) -> str:
    """A link in words, for tables.

    >>> describe(1e9, 0.005)
    '1gbit + 5 ms'
    """
    rate = "unshaped" if bits_per_second is None else rate_text(bits_per_second)
    return f"{rate} + {delay * 1000:g} ms" if delay else rate
