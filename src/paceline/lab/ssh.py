"""The ssh of an emulated host: the script `bin/ssh` of a lab runs this.

Run by path with the standard library alone (`python -I -S ssh.py STATE ...`), so
that it costs milliseconds: import nothing of Paceline here.
"""

from __future__ import annotations

import getopt
import json
import os
import socket
import sys
import time

# OpenSSH's options as getopt writes them: a colon where a value follows, which is no host then.
SSH_OPTIONS = "1246AB:CD:E:F:GI:J:KL:MNO:P:Q:R:S:TVW:XYab:c:e:fgi:kl:m:no:p:qstvw:xy"
USAGE = "usage: ssh [options] [user@]HOST [options] [command]"
SSH_CONNECT_SECONDS = 10.0
# What ARP takes to find out that no one is there.
NO_ROUTE_SECONDS = 3.0


class Ssh:
    """Stands in for `ssh [options] HOST [command]`, with its exit codes and its silences.

    It reaches an agent by a Unix socket and not over the lab's links, so it looks
    at what was done to the hosts and behaves as if it had gone over them.
    """

    def __init__(self, state: str, arguments: list[str]) -> None:
        self.state = state
        self.flags: list[str] = []
        self.settings: dict[str, str] = {}
        self.wanted, self.rest, self.unknown = "", list(arguments), ""
        try:
            self.read()
        except getopt.GetoptError as error:
            self.unknown = error.msg

    def read(self) -> None:
        """Options, the host, more options, the command: as OpenSSH reads them.

        Launchers (horovodrun) write options after the host, which end with the command's first
        word; after `--` there are none.
        """
        ended = self.read_options()
        if not self.rest:
            return
        self.wanted = self.rest.pop(0).rpartition("@")[2]
        if not ended:
            self.read_options()

    def read_options(self) -> bool:
        """Take options off; gives whether `--` ended them."""
        before = self.rest
        options, self.rest = getopt.getopt(before, SSH_OPTIONS)
        for option, value in options:
            self.flags.append(option)
            if option == "-o":
                name, _, setting = value.replace("=", " ", 1).strip().partition(" ")
                # What was said first holds.
                self.settings.setdefault(name.lower(), setting.strip())
        taken = before[: len(before) - len(self.rest)]
        return taken[-1:] == ["--"]

    def seconds(self, name: str, default: float) -> float:
        """A setting given by `-o NAME=VALUE`."""
        try:
            return float(self.settings[name.lower()])
        except (KeyError, ValueError):
            return default

    def is_cut(self, *hosts: str) -> bool:
        """Whether a link on the way carries nothing."""
        return any(os.path.exists(f"{self.state}/{host}.cut") for host in hosts)  # noqa: PTH110

    def run(self) -> int:
        """The exit code: the command's, or 255 when the host was not reached."""
        if self.unknown or not self.wanted:
            return self.fail(f"{self.unknown}\n{USAGE}".strip())
        with open(f"{self.state}/hosts.json") as file:  # noqa: PTH123
            hosts: dict[str, str] = json.load(file)
        names = [name for name, address in hosts.items() if self.wanted in (name, address)]
        if not names:
            return self.fail(f"ssh: Could not resolve hostname {self.wanted}: not in this lab")
        own = os.environ.get("PACELINE_LAB_HOST", "")
        self.way = () if names[0] == own else (names[0], own)
        connect_seconds = self.seconds("ConnectTimeout", SSH_CONNECT_SECONDS)
        lost = not os.path.exists(f"{self.state}/{names[0]}.socket")  # noqa: PTH110
        if self.is_cut(*self.way) and not lost:
            time.sleep(connect_seconds)
            return self.fail(f"ssh: connect to host {self.wanted} port 22: Connection timed out")
        try:
            connection = self.call(f"{self.state}/{names[0]}.socket")
        except OSError:
            time.sleep(min(NO_ROUTE_SECONDS, connect_seconds))
            return self.fail(f"ssh: connect to host {self.wanted} port 22: No route to host")
        return self.attend(connection)

    def call(self, path: str) -> socket.socket:
        """Ask the agent to start the command with our own standard streams."""
        command = ["/bin/sh", "-c", " ".join(self.rest)] if self.rest else ["/bin/sh"]
        no_input = "-n" in self.flags or "-f" in self.flags
        source = os.open(os.devnull, os.O_RDONLY) if no_input else 0
        request = {"do": "start", "argv": command, "env": None, "cwd": None}
        data = json.dumps({**request, "hang_up": "-t" in self.flags}).encode() + b"\n"
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        sent = socket.send_fds(connection, [data], [source, 1, 2])
        if sent < len(data):
            connection.sendall(data[sent:])
        return connection

    def attend(self, connection: socket.socket) -> int:
        """Wait for the end of the command, or of the host."""
        try:
            for line in connection.makefile("rb"):
                message = json.loads(line)
                if "error" in message:
                    return self.fail(f"ssh: {message['error']}")
                if "exit" in message:
                    self.hear_nothing_while_cut()
                    code: int = message["exit"]
                    return 255 if code < 0 else code
        except ConnectionError:
            pass
        self.hear_nothing_while_cut()
        return self.fail(f"Connection to {self.wanted} closed by remote host.")

    def hear_nothing_while_cut(self) -> None:
        """A dead link tells no one that the command, or the host, has ended."""
        alive = self.seconds("ServerAliveInterval", 0) * self.seconds("ServerAliveCountMax", 3)
        deadline = time.monotonic() + alive if alive else float("inf")
        while self.is_cut(*self.way):
            if time.monotonic() > deadline:
                sys.exit(self.fail(f"Timeout, server {self.wanted} not responding."))
            time.sleep(0.1)

    def fail(self, words: str) -> int:
        print(words, file=sys.stderr)
        return 255


if __name__ == "__main__":
    sys.exit(Ssh(sys.argv[1], sys.argv[2:]).run())
