"""Building a lab and taking it down: directory, control groups, agents, links."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.errors import RunError, UnsupportedError
from paceline.lab import agent, environment, groups, network, probe, process, relay, supervisor
from paceline.lab.process import LabProcess
from paceline.lab.spec import LabSpec

PREFIX = "paceline-lab-"
# Not a valid host name, so it cannot clash with one.
SWITCH = "_switch"
START_SECONDS = 30.0
REMOVE_SECONDS = 30.0
_numbers = itertools.count()


class Construction:
    """Everything that exists outside Python while a lab is open."""

    def __init__(self, spec: LabSpec, *, emulated: bool) -> None:
        self.spec = spec
        self.emulated = emulated
        self.name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
        self.tree = groups.GroupTree(self.name)
        self.cannot = _not_emulated(spec, emulated=emulated)
        self.groups: dict[str, groups.HostGroup] = {}
        self.hosts: dict[str, int] = {}
        self.addresses = spec.addresses if emulated else loopback_addresses(spec)
        self._handles: dict[str, int] = {}
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._relay: LabProcess | None = None
        self._lock = -1

    def build(self) -> None:
        """Make it all; on an error call `remove`."""
        self.state = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        # Held by us and the supervisor: `lab clean` knows by it that the lab is alive.
        self._lock = os.open(self.state / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        environment.write_files(self.spec, self.state, self.addresses, emulated=self.emulated)
        cores = groups.assign_cores(self.spec.hosts, os.sched_getaffinity(0))
        if self.emulated:
            names = [host.name for host in self.spec.hosts]
            (self.state / "groups.json").write_text(json.dumps(self.tree.plan(names)))
        # From here on the supervisor clears up, whatever happens to us.
        self._start_agents(cores)
        if self.emulated:
            self._limit(cores)
            self._connect()

    def _limit(self, cores: dict[str, list[int]]) -> None:
        for host in self.spec.hosts:
            try:
                self.groups[host.name] = self.tree.make(host, cores[host.name])
            except OSError as error:
                raise RunError(f"cannot set the limits of host {host.name!r}: {error}") from error

    def socket(self, name: str) -> Path:
        """Where the agent of a host listens."""
        return self.state / f"{name}.socket"

    def _start_agents(self, cores: dict[str, list[int]]) -> None:
        configs: dict[str, str] = {}
        for name in [host.name for host in self.spec.hosts] + ([SWITCH] if self.emulated else []):
            configs[name] = str(self.state / f"{name}.json")
            config = self._agent_config(name, cores.get(name, []))
            Path(configs[name]).write_text(json.dumps(config))
        plan = {
            "lab": os.getpid(),
            "state": str(self.state),
            "script": str(agent.__file__),
            "agents": configs,
            "namespaces": self.emulated,
        }
        path = self.state / "supervisor.json"
        path.write_text(json.dumps(plan))
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(supervisor.__file__), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[self._lock],
            cwd="/",
        )
        assert self._supervisor.stdout is not None
        answer: dict[str, Any] = json.loads(self._supervisor.stdout.readline() or b"{}")
        if "error" in answer or not answer:
            raise RunError(f"cannot start the hosts of the lab: {answer.get('error', 'killed')}")
        for name, pid in answer.items():
            self._handles[name] = os.pidfd_open(pid)
            self._await(name)
        self.hosts = {name: pid for name, pid in answer.items() if name != SWITCH}
        self._switch_pid = answer.get(SWITCH, 0)

    def _agent_config(self, name: str, cores: list[int]) -> dict[str, Any]:
        login = environment.login_environment(self.spec, self.state, name, emulated=self.emulated)
        bind = {
            "/etc/hosts": str(self.state / "etc-hosts"),
            "/etc/resolv.conf": str(self.state / "etc-resolv.conf"),
        }
        if name != SWITCH:
            bind["/etc/hostname"] = str(self.state / f"{name}.hostname")
        limited = self.emulated and name != SWITCH
        return {
            "socket": str(self.socket(name)),
            "namespaces": self.emulated,
            "hostname": name.strip("_"),
            "bind": bind,
            "cgroups": self.tree.entrances(name) if limited else [],
            "cores": cores,
            "environment": login,
        }

    def _await(self, name: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        error = Path(f"{self.socket(name)}.error")
        while not self.socket(name).exists():
            if error.exists():
                raise RunError(f"host {name!r} cannot be set up: {error.read_text()}")
            if time.monotonic() > deadline:
                raise RunError(f"host {name!r} did not start within {START_SECONDS:g} s")
            time.sleep(0.002)

    def _connect(self) -> None:
        """Make the switch, the links and their shapes."""
        for command in network.switch():
            self.execute(SWITCH, command)
        wires: list[str] = []
        taps: list[int] = []
        for host in self.spec.hosts:
            delay = self.spec.delay_of(host.name)
            if delay:
                wires.append(f"{3 + len(taps)}:{4 + len(taps)}:{delay}")
                for place, interface in (
                    (host.name, network.INTERFACE),
                    (SWITCH, network.port(host.name)),
                ):
                    request = {"do": "tap", "interface": interface}
                    taps += process.ask(self.socket(place), place, request)[1]
            self._connect_host(host.name, make=not delay)
        if wires:
            self._relay = process.start(
                self.socket(SWITCH),
                SWITCH,
                [sys.executable, "-I", "-S", str(relay.__file__), *wires],
                env={},
                cwd="/",
                extra=taps,
                outside=True,
            )
        for tap in taps:
            os.close(tap)

    def _connect_host(self, host: str, *, make: bool) -> None:
        space = os.open(f"/proc/{self.hosts[host]}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for command in network.wire(host, make=make):
                self.execute(SWITCH, command, extra=[space])
        finally:
            os.close(space)
        for command in network.address(self.addresses[host], self.spec.prefix_length):
            self.execute(host, command)
        for place, interface in ((host, network.INTERFACE), (SWITCH, network.port(host))):
            command = network.in_order(interface, os.cpu_count() or 1)
            self.execute(place, command, must=False)  # not every kernel can
        bits_per_second = self.spec.rate_of(host)
        if bits_per_second is not None:
            fewer = network.few_packets(network.INTERFACE, bits_per_second)
            self.execute(host, fewer, must=False)  # an older `ip` cannot
            self.execute(host, network.shape(network.INTERFACE, bits_per_second))
            self.execute(SWITCH, network.shape(network.port(host), bits_per_second))

    def execute(
        self, place: str, command: list[str], *, extra: list[int] | None = None, must: bool = True
    ) -> None:
        """Run a short command of the lab itself on a host or the switch, outside its limits."""
        with tempfile.TemporaryFile() as output:
            started = process.start(
                self.socket(place),
                place,
                command,
                env={"PATH": probe.search_path()},
                cwd="/",
                streams=(subprocess.DEVNULL, output, output),
                extra=extra or [],
                outside=True,
            )
            code = started.wait(START_SECONDS)
            started.close()
            if code and must:
                output.seek(0)
                words = " ".join(output.read().decode(errors="replace").split())
                raise RunError(f"{' '.join(command)!r} failed on {place!r}: {words}")

    def relay_seconds(self) -> float | None:
        """CPU time of the relay so far."""
        if self._relay is None:
            return None
        pid = _outer_pid(self._switch_pid, self._relay.pid)
        if pid is None:
            return None
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end_host(self, name: str) -> None:
        """Kill everything on a host at once."""
        if not self.emulated:
            for pid in supervisor.descendants(self.hosts[name]):
                _kill(pid)
        signal.pidfd_send_signal(self._handles[name], signal.SIGKILL)
        self.socket(name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Take it all down; whatever the supervisor leaves, if it was killed, goes too."""
        if self._relay is not None:
            self._relay.close()
        if self._supervisor is not None:
            assert self._supervisor.stdin is not None
            assert self._supervisor.stdout is not None
            self._supervisor.stdin.close()
            try:
                self._supervisor.wait(REMOVE_SECONDS)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
            self._supervisor.stdout.close()
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        state: Path | None = getattr(self, "state", None)
        if state is not None and state.is_dir():
            supervisor.clear(str(state))
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def loopback_addresses(spec: LabSpec) -> dict[str, str]:
    """Addresses of hosts that are plain processes: 127.77.0.1, 127.77.0.2, ..."""
    return {
        host.name: f"127.77.{(index + 1) // 256}.{(index + 1) % 256}"
        for index, host in enumerate(spec.hosts)
    }


def _not_emulated(spec: LabSpec, *, emulated: bool) -> list[str]:
    """What the file asks for and this machine cannot give."""
    shortfalls: list[str] = []
    available = len(os.sched_getaffinity(0))
    for host in spec.hosts:
        if host.visible_cores > available:
            shortfalls.append(
                f"{host.visible_cores} visible cores of host {host.name!r} (there are {available})"
            )
    if emulated:
        asked = {
            "CPU quota": any(host.cores < host.visible_cores for host in spec.hosts),
            "memory limit": any(host.memory is not None for host in spec.hosts),
        }
        lacking = probe.group_obstacles()
        shortfalls += [text for text in lacking if asked[text.partition(" (")[0]]]
        if any(spec.delay_of(host.name) for host in spec.hosts):
            obstacle = probe.delay_obstacle()
            if obstacle is not None:
                raise UnsupportedError(
                    f"links cannot be delayed on this machine: {obstacle}; or remove `delay`"
                )
        return shortfalls
    shortfalls += ["host names", "separate interfaces and their counters"]
    shortfalls.append("MPI between hosts (mpiexec starts all ranks on one)")
    if any(spec.rate_of(host.name) for host in spec.hosts):
        shortfalls.append("link rates")
    if any(spec.delay_of(host.name) for host in spec.hosts):
        shortfalls.append("link delays")
    if any(host.cores < host.visible_cores for host in spec.hosts):
        shortfalls.append("CPU quotas")
    if any(host.memory for host in spec.hosts):
        shortfalls.append("memory limits")
    kinds = sorted({fault.kind for fault in spec.faults} & {"cut", "restore", "throttle", "slow"})
    shortfalls += [f"the fault {kind!r}" for kind in kinds]
    return shortfalls


def _outer_pid(ancestor: int, inner: int) -> int | None:
    """The process id, here, of a descendant that has `inner` in its own namespace."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                status = (path / "status").read_text()
                same = os.readlink(path / "ns/pid") == os.readlink(f"/proc/{ancestor}/ns/pid")  # noqa: PTH115
            except OSError:
                continue
            if same and f"\t{inner}\n" in status.partition("NSpid:")[2].partition("\n")[0] + "\n":
                return int(path.name)
    return None


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
