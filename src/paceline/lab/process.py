"""A process on an emulated host, with the manners of `subprocess.Popen`."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from paceline.errors import ConfigError, RunError
from paceline.lab import agent

Stream = int | IO[Any] | None
# A host that loses its power has no exit code to give: say what `kill -9` would.
HOST_GONE = -int(signal.SIGKILL)


class LabProcess:
    """A process that runs on a host of a lab.

    >>> process = lab.start(["sleep", "60"], on="b")  # doctest: +SKIP
    >>> process.terminate(); process.wait(timeout=5)  # doctest: +SKIP
    -15
    """

    def __init__(
        self,
        connection: socket.socket,
        host: str,
        arguments: Sequence[str],
        pipes: Sequence[IO[bytes] | None],
    ) -> None:
        self.host = host
        self.args = list(arguments)
        self.pid = 0
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = pipes
        self._connection = connection
        self._take(block=True)

    def _take(self, block: bool) -> None:
        """Read what the agent has to say, if anything."""
        if not block and not select.select([self._connection], [], [], 0)[0]:
            return
        message, _ = agent.receive(self._connection)
        if message is None:
            self._end(HOST_GONE)
            return
        for each in [message, *message.get("then", [])]:
            if "error" in each:
                self._end(127)
                raise ConfigError(
                    f"cannot start {self.args[0]!r} on host {self.host!r}: {each['error']}"
                )
            self.pid = each.get("pid", self.pid)
            if "exit" in each:
                self._end(each["exit"])

    def _end(self, code: int) -> None:
        self.returncode = code
        self._connection.close()

    def poll(self) -> int | None:
        """The exit code, or None while the process runs; minus N when signal N ended it."""
        if self.returncode is None and self._connection.fileno() >= 0:
            self._take(block=False)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._connection], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._take(block=True)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process and its group, if it still runs."""
        if self.poll() is None:
            try:
                agent.send(self._connection, {"number": int(number)}, [])
            except OSError:
                self._end(HOST_GONE)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close our ends of its pipes and forget it."""
        self._connection.close()
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def start(
    path: Path,
    host: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: str | None,
    streams: Sequence[Stream] = (None, None, None),
    extra: Sequence[int] = (),
    outside: bool = False,
) -> LabProcess:
    """Start a process through the agent that listens at `path`.

    `extra` descriptors become 3, 4, ...; `outside` leaves it out of the host's limits.
    """
    theirs: list[int] = []
    ours: list[IO[bytes] | None] = []
    to_close: list[int] = []
    for number, stream in enumerate(streams):
        descriptor, pipe, temporary = _stream(number, stream)
        theirs.append(descriptor)
        ours.append(pipe)
        to_close += [descriptor] if temporary else []
    request = {
        "do": "start",
        "argv": list(arguments),
        "env": None if env is None else dict(env),
        "cwd": cwd,
        "outside": outside,
    }
    try:
        connection = agent.call(str(path), request, [*theirs, *extra])
        return LabProcess(connection, host, arguments, ours)
    except (OSError, ConfigError) as error:
        for pipe in ours:
            if pipe is not None:
                pipe.close()
        if isinstance(error, ConfigError):
            raise
        raise RunError(f"host {host!r} does not answer: it was killed ({error})") from error
    finally:
        for descriptor in to_close:
            os.close(descriptor)


def _stream(number: int, stream: Stream) -> tuple[int, IO[bytes] | None, bool]:
    """Their descriptor, our end of a pipe, and whether theirs is to be closed by us."""
    if stream is None:
        return number, None, False
    if stream == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDWR), None, True
    if stream == subprocess.PIPE:
        read, write = os.pipe2(os.O_CLOEXEC)
        if number == 0:
            return read, os.fdopen(write, "wb", buffering=0), True
        return write, os.fdopen(read, "rb"), True
    return (stream if isinstance(stream, int) else stream.fileno()), None, False


def ask(path: Path, host: str, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Ask an agent for something and return its answer; RunError when it cannot."""
    try:
        connection = agent.call(str(path), message)
        with connection:
            answer, descriptors = agent.receive(connection)
    except OSError as error:
        raise RunError(f"host {host!r} does not answer: it was killed ({error})") from error
    if answer is None or "error" in answer:
        reason = "it was killed" if answer is None else answer["error"]
        raise RunError(f"host {host!r} cannot do {message['do']!r}: {reason}")
    return answer, descriptors
