"""A running lab: start it, run commands on its hosts, break things, read counters."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from paceline.errors import ConfigError, RunError, UnsupportedError
from paceline.lab import environment, network, probe, process
from paceline.lab.construction import SWITCH, Construction
from paceline.lab.groups import Usage
from paceline.lab.network import Counters
from paceline.lab.process import LabProcess, Stream
from paceline.lab.spec import FaultSpec, LabSpec
from paceline.schema.units import rate


class Lab:
    """A cluster on this machine, from `with` to its end.

    >>> with Lab(LabSpec.load("examples/lab/two-hosts.toml")) as lab:  # doctest: +SKIP
    ...     lab.run(["hostname"], on="b", capture_output=True).stdout
    b'b\\n'

    As root its hosts are namespaces with shaped links and limits. Otherwise, or
    with `plain`, they are ordinary processes that differ by a loopback address,
    and `cannot` says what is therefore not emulated.
    """

    def __init__(self, spec: LabSpec, *, plain: bool = False) -> None:
        self.spec = spec
        self.warnings: list[str] = []
        self.cannot: list[str] = []
        reason = "plain processes were asked for" if plain else probe.namespace_obstacle()
        self.emulated = reason is None
        self.plain_reason = reason
        self._construction: Construction | None = None
        self._started: list[LabProcess] = []
        self._lost: dict[str, str] = {}
        self._last_counters: dict[str, Counters] = {}
        self._last_usage: dict[str, Usage] = {}

    def open(self) -> Lab:
        """Build it; `close` takes it down, and so does the end of this process."""
        overcommitted = probe.overcommitted(self.spec)
        self.warnings += [overcommitted] if overcommitted else []
        construction = Construction(self.spec, emulated=self.emulated)
        self.cannot += construction.cannot
        self._construction = construction
        try:
            construction.build()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End everything on the hosts and remove them; safe to call twice."""
        construction, self._construction = self._construction, None
        if construction is not None:
            construction.remove()
        for started in self._started:
            started.poll()  # learns that its host is gone, and lets go of its socket
        self._started.clear()

    def __enter__(self) -> Lab:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _built(self) -> Construction:
        if self._construction is None:
            raise RunError("this lab is not open: use it inside `with Lab(spec) as lab:`")
        return self._construction

    @property
    def addresses(self) -> dict[str, str]:
        """Host name to address, as the hosts see each other."""
        return dict(self._built.addresses)

    @property
    def hosts_file(self) -> str:
        """Path of the generated hosts.toml (`PACELINE_LAB_HOSTS` on the hosts)."""
        return str(self._built.state / "hosts.toml")

    def start(
        self,
        command: Sequence[str],
        *,
        on: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> LabProcess:
        """Start a command on a host (the first by default) and return at once.

        `env` is added to the caller's environment and the lab's own variables.
        """
        if not command:
            raise ConfigError("there is no command to run: write it after --, e.g. -- hostname")
        host = self.spec.host(on).name if on else self.spec.hosts[0].name
        if host in self._lost:
            raise RunError(f"cannot start a command on host {host!r}: it was {self._lost[host]}")
        variables = environment.caller_environment(
            self.spec, self._built.state, host, emulated=self.emulated
        )
        started = process.start(
            self._built.socket(host),
            host,
            command,
            env={**variables, **(env or {})},
            cwd=cwd or os.getcwd(),  # noqa: PTH109
            streams=(stdin, stdout, stderr),
        )
        self._started = [each for each in self._started if each.poll() is None] + [started]
        return started

    def run(
        self,
        command: Sequence[str],
        *,
        on: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        capture_output: bool = False,
        timeout: float | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command on a host to its end, like `subprocess.run`."""
        with contextlib.ExitStack() as stack:
            files: list[IO[bytes]] = []
            streams: dict[str, Any] = {}
            if capture_output:
                # Files and not pipes: a daemon that a command leaves behind holds them open.
                files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
                streams = {"stdout": files[0], "stderr": files[1]}
            started = self.start(
                command, on=on, env=env, cwd=cwd, stdin=subprocess.DEVNULL, **streams
            )
            stack.callback(started.close)
            try:
                code = started.wait(timeout)
            except BaseException:
                started.kill()
                raise
            done = subprocess.CompletedProcess[bytes](list(command), code)
            if capture_output:
                done.stdout, done.stderr = (_read_again(file) for file in files)
        if check:
            done.check_returncode()
        return done

    def counters(self) -> dict[str, Counters]:
        """Bytes and packets through each host's interface; empty where they are not emulated.

        A host that was killed keeps its last counters.
        """
        for host, pid in self._built.hosts.items():
            if self.emulated and host not in self._lost:
                with contextlib.suppress(OSError):
                    self._last_counters[host] = network.read_counters(pid)
        return dict(self._last_counters)

    def usage(self) -> dict[str, Usage]:
        """CPU time, throttling and memory of each host; empty where they are not measured."""
        for host, group in self._built.groups.items():
            self._last_usage[host] = group.usage()
        return dict(self._last_usage)

    def relay_seconds(self) -> float | None:
        """CPU time that the delay relay used; None without delays."""
        return self._built.relay_seconds()

    def kill(self, host: str) -> None:
        """The power of a host fails: silence on its link, its processes gone."""
        if self.emulated:
            self._switch(network.cut(self.spec.host(host).name), host)
            (self._built.state / f"{host}.cut").touch()
        self._end_host(host, "killed")

    def shutdown(self, host: str) -> None:
        """All processes of a host are killed; peers see their connections close."""
        self.spec.host(host)
        if self.emulated:
            # While the agent lives the kernel still says goodbye to the peers.
            self._signal(host, signal.SIGKILL, None)
            time.sleep(0.1)
        self._end_host(host, "shut down")

    def cut(self, host: str) -> None:
        """A host's link carries nothing; neither end is told."""
        self._needs_link("cut a link", host)
        self._switch(network.cut(host), host)
        (self._built.state / f"{host}.cut").touch()

    def restore(self, host: str) -> None:
        """A host's link works again, at the rate that the lab gave it."""
        self._needs_link("restore a link", host)
        self._switch(network.restore(host), host)
        (self._built.state / f"{host}.cut").unlink(missing_ok=True)
        self._shape(host, self.spec.rate_of(host))

    def throttle(self, host: str, to: str) -> None:
        """Change the rate of a host's link, both directions."""
        self._needs_link("throttle a link", host)
        self._shape(host, rate(to))

    def slow(self, host: str, to: float) -> None:
        """A host's cores do from now on what so many cores would."""
        name = self.spec.host(host).name
        group = self._built.groups.get(name)
        if group is None or "cpu" not in group.folders:
            raise UnsupportedError(
                f"cannot slow host {name!r} down: there is no control group for its cores here"
            )
        group.limit(to)

    def pause(self, host: str, process: str | None = None) -> int:
        """Stop a host's processes, or those whose command line contains a text."""
        return self._signal(host, signal.SIGSTOP, process)

    def resume(self, host: str, process: str | None = None) -> int:
        """Let stopped processes go on."""
        return self._signal(host, signal.SIGCONT, process)

    def signal(self, host: str, number: int, process: str | None = None) -> int:
        """Send a signal to a host's processes, or to those whose command line contains a text."""
        return self._signal(host, number, process)

    def apply(self, fault: FaultSpec) -> None:
        """Make a fault of the lab file happen now."""
        if fault.kind in ("pause", "resume"):
            getattr(self, fault.kind)(fault.host, fault.process)
        elif fault.kind == "throttle":
            assert fault.rate is not None, "checked by FaultSpec"
            self.throttle(fault.host, fault.rate)
        elif fault.kind == "slow":
            assert fault.cores is not None, "checked by FaultSpec"
            self.slow(fault.host, fault.cores)
        else:
            getattr(self, fault.kind)(fault.host)

    def _needs_link(self, what: str, host: str) -> None:
        self.spec.host(host)
        if not self.emulated:
            raise UnsupportedError(
                f"cannot {what} of host {host!r}: hosts are plain processes here because"
                f" {self.plain_reason}"
            )
        if host in self._lost:
            raise RunError(f"cannot {what} of host {host!r}: it was {self._lost[host]}")

    def _switch(self, command: list[str], host: str) -> None:
        if host not in self._lost:
            self._built.execute(SWITCH, command)

    def _shape(self, host: str, bits_per_second: float | None) -> None:
        for place, interface in ((host, network.INTERFACE), (SWITCH, network.port(host))):
            if bits_per_second is not None:
                self._built.execute(place, network.shape(interface, bits_per_second))
            else:
                # Fails when there is no limit to lift, which is what is wanted.
                self._built.execute(place, network.unshape(interface), must=False)

    def _signal(self, host: str, number: int, match: str | None) -> int:
        name = self.spec.host(host).name
        if name in self._lost:
            raise RunError(f"cannot signal processes of host {name!r}: it was {self._lost[name]}")
        request = {"do": "signal", "number": int(number), "match": match}
        answer, _ = process.ask(self._built.socket(name), name, request)
        return int(answer["count"])

    def _end_host(self, host: str, how: str) -> None:
        name = self.spec.host(host).name
        if name not in self._lost:
            self.counters()
            self.usage()
            self._lost[name] = how
            self._built.end_host(name)


def _read_again(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()
