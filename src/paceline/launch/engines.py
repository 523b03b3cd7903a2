"""Engines: who starts an agent on each host. One file each, one registry.

`command_lines` is pure: what would be run and which files it needs, for tests and for people who
want to see it. `start` runs it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import psutil

from paceline.config.environment import SECRET, child_environment
from paceline.errors import UnsupportedError, UserError, unknown_name
from paceline.schema.hosts import Host, NodePlace
from paceline.schema.registry import Registry, imported
from paceline.text import printable

ENGINES: Registry[str] = Registry("engine", "paceline.engines", {
    "mpi": "paceline.launch.mpi:MpiEngine",
    "torchrun": "paceline.launch.torchrun:TorchrunEngine",
    "ssh": "paceline.launch.ssh:SshEngine",
    "slurm": "paceline.launch.slurm:SlurmEngine",
    "ray": "paceline.launch.clusters.engine:RayEngine",
    "spark": "paceline.launch.clusters.engine:SparkEngine",
}, str)  # fmt: skip
"""By name its "module:class", imported only when it is used."""
LOCAL = "local"
"""The engine of one machine, which needs no agents: `launch/local.py`."""
_END_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What an engine needs to know to start the agents."""

    places: tuple[NodePlace, ...]
    addresses: tuple[str, ...]
    """The launcher's own, the likeliest first."""
    port: int
    secret: str
    run: Path
    name: str = "run"
    """Of the run, for whoever lists jobs."""
    store_port: int = 29500
    """A port of the first host that is free, for launchers that want one."""
    network: str | None = None
    """Network (as 10.0.0.0/24) that joins the hosts, where it is known."""
    interface: str | None = None
    """Interface by which they reach each other, where its name is the same on all."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Every host once, in the order of nodes."""
        return tuple({place.host.name: place.host for place in self.places}.values())

    def agent(self, host: Host | None = None, *more: str) -> list[str]:
        """The command line of an agent."""
        to = ",".join(f"{address}:{self.port}" for address in self.addresses)
        python = (host.python if host is not None else None) or sys.executable
        module = ["-m", "paceline.launch.agent"]
        return [python, *module, "--to", to, *more]

    @property
    def variables(self) -> dict[str, str]:
        """What agents must find in their environment: command lines can be read by everybody."""
        return {SECRET: self.secret}


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process of an engine, here."""

    label: str
    """What its log is called."""
    words: list[str]
    files: dict[str, str] = field(default_factory=dict)
    """Files that must be in the run directory first: name to text."""
    variables: dict[str, str] = field(default_factory=dict)
    told: str = field(default="", repr=False)
    """What it is told on its standard input."""


class Engine(ABC):
    """A way to start agents."""

    name: ClassVar[str]
    backend: ClassVar[str] = "gloo"
    """What carries the bytes between nodes."""
    places_nodes: ClassVar[bool] = False
    """The engine decides which host a node is on; agents tell."""
    outlives_a_loss: ClassVar[bool] = True
    """What it has started goes on when one of its hosts is lost."""
    finds_hosts: ClassVar[bool] = False
    """It has a cluster, which names the hosts before anything is started."""

    @abstractmethod
    def command_lines(self, launch: Launch) -> list[Command]:
        """What `start` runs."""

    def start(self, launch: Launch) -> Running:
        """Start every agent."""
        return StartedProcesses(self.command_lines(launch), launch.run)


class Running(ABC):
    """What an engine has started."""

    @abstractmethod
    def has_begun(self) -> bool:
        """False while the engine itself waits for its turn."""

    def waits_for(self) -> str:
        """What the user is told while it waits for its turn; "" when it does not."""
        return ""

    @abstractmethod
    def failure(self) -> str | None:
        """Why agents that have not come never will, or None."""

    @abstractmethod
    def has_ended(self) -> bool:
        """True when nothing of it runs any more."""

    @abstractmethod
    def last_words(self) -> str:
        """What it printed last."""

    @abstractmethod
    def end(self) -> None:
        """End whatever still runs."""


class StartedProcesses(Running):
    """Processes of this machine, such as mpiexec or one ssh per host."""

    def __init__(self, commands: list[Command], run: Path) -> None:
        self._logs: list[Path] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._family: set[psutil.Process] = set()
        try:
            for command in commands:
                self._start(command, run)
        except BaseException:
            self.end()
            raise

    def _start(self, command: Command, run: Path) -> None:
        for name, text in command.files.items():
            (run / name).write_text(text)
        log = run / f"launch-{command.label}.log"
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    command.words,
                    **self.streams(command, output),
                    env=child_environment(command.variables),
                    # Ctrl-C reaches the launcher alone, which decides who hears of it.
                    start_new_session=True,
                )
            except OSError as error:
                raise UserError(
                    f"{command.words[0]} cannot be started: {error.strerror}; is it installed?"
                ) from None
        self._logs.append(log)
        self._processes.append(process)
        if process.stdin is not None and command.told:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # its log tells why it ended
                process.stdin.write(command.told.encode())

    def streams(self, command: Command, log: Any) -> dict[str, Any]:
        """Where its standard streams go."""
        told = subprocess.PIPE if command.told else subprocess.DEVNULL
        return {"stdin": told, "stdout": log, "stderr": subprocess.STDOUT}

    def has_begun(self) -> bool:
        return True

    def failure(self) -> str | None:
        for process, log in zip(self._processes, self._logs, strict=True):
            code = process.poll()
            if code is not None:
                words = Path(str(process.args[0])).name  # type: ignore[index]
                return f"{words} ended with code {code}: {tail(log) or 'it said nothing'}"
        return None

    def has_ended(self) -> bool:
        self._learn_family()
        return all(process.poll() is not None for process in self._processes)

    def _learn_family(self) -> None:
        """Remember what our processes have started: an ssh to a dead host outlives mpiexec."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(psutil.Error):
                    self._family.update(psutil.Process(process.pid).children(recursive=True))

    def last_words(self) -> str:
        return next((words for log in self._logs if (words := tail(log))), "")

    def end(self) -> None:
        self._learn_family()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                # Also when the first process has ended: the group may have more.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if process.poll() is None or number == signal.SIGKILL:
                        os.killpg(process.pid, number)
            deadline = time.monotonic() + _END_SECONDS
            while time.monotonic() < deadline and not self.has_ended():
                time.sleep(0.02)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        for relative in self._family:
            with contextlib.suppress(psutil.Error):  # knows a number that was given anew
                relative.kill()
        for log in self._logs:
            if log.exists() and log.stat().st_size == 0:
                log.unlink()


def tail(log: Path, lines: int = 3) -> str:
    """The last lines of a log, in one."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    words = [printable(line.strip()) for line in text.splitlines() if line.strip(" -\t")]
    return " / ".join(words[-lines:])[-600:]


def engine_class(name: str) -> type[Engine]:
    """The class of an engine by its name."""
    if name not in ENGINES:
        raise UnsupportedError(unknown_name("engine", name, [*ENGINES, LOCAL, "auto"]))
    return cast("type[Engine]", imported(ENGINES[name], f"engine {name!r}"))


def finds_hosts(engine: str) -> bool:
    """Whether an engine, named with or without an option, has a cluster that names the hosts."""
    name = engine.partition(":")[0]
    return name in ENGINES and engine_class(name).finds_hosts
