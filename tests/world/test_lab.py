"""Emulated hosts, their links, limits and faults: real processes and real traffic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import ConfigError, RunError
from paceline.lab import Lab, LabSpec
from paceline.lab.mpiexec import without_hosts
from paceline.lab.testing import lab_spec, leftovers_of, make_lab, skip_without_namespaces

__all__ = ["make_lab"]
pytestmark = pytest.mark.lab
MakeLab = Callable[..., Lab]
# The standard library is enough on most hosts, and without `site` Python starts at once.
PYTHON = [sys.executable, "-I", "-S", "-c"]
PATIENCE = 300.0
"""Seconds for what is sure to come: only something that hangs takes as long."""

SERVER = """
import socket, sys
server = socket.create_server(("", 7000))
print("ready", flush=True)
connection, _ = server.accept()
count = 0
while data := connection.recv(1 << 20):
    count += len(data)
    if count >= int(sys.argv[1]):
        connection.sendall(b"!" * 1)
        count = 0
"""
CLIENT = """
import json, socket, sys, time
size, rounds = int(sys.argv[2]), int(sys.argv[3])
connection = socket.create_connection((sys.argv[1], 7000), timeout=600)
start = time.monotonic()
for _ in range(rounds):
    connection.sendall(bytes(size))
    assert connection.recv(1) == b"!"
print(json.dumps(time.monotonic() - start))
"""


def transfer(lab: Lab, size: int, rounds: int = 1) -> float:
    """Seconds that `size` bytes from a to b and a one-byte answer take, `rounds` times."""
    server = lab.start([*PYTHON, SERVER, str(size)], on="b", stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        arguments = [*PYTHON, CLIENT, "b", str(size), str(rounds)]
        done = lab.run(arguments, on="a", capture_output=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return float(json.loads(done.stdout))
    finally:
        server.kill()
        server.wait(PATIENCE)
        server.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens sooner or later, however busy the machine is."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def output(lab: Lab, script: str, on: str | None = None) -> str:
    done = lab.run(["sh", "-c", script], on=on, capture_output=True, timeout=600)
    return (done.stdout + done.stderr).decode().strip()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two hosts at 100 Mbit/s, for tests that break nothing."""
    skip_without_namespaces()
    with Lab(lab_spec("a", "b", rate="100mbit")) as shared:
        yield shared


def test_hosts_have_names_and_reach_each_other_by_them(lab: Lab) -> None:
    assert output(lab, "hostname", on="a") == "a"
    assert output(lab, "hostname", on="b") == "b"
    assert output(lab, "getent hosts b", on="a").split() == ["10.77.0.2", "b"]
    transfer(lab, 1)
    assert output(lab, "ls /sys/class/net", on="b").split() == ["eth0", "lo"]


def test_the_machine_itself_is_untouched(lab: Lab) -> None:
    routes = Path("/proc/net/route").read_text() + Path("/proc/net/dev").read_text()
    assert "10.77" not in Path("/etc/hosts").read_text()
    assert "p-a" not in routes
    assert "004D0A" not in routes  # 10.77.0 as the kernel writes it
    assert os.uname().nodename not in ("a", "b")


def test_a_link_is_as_slow_as_it_says_and_counts_its_bytes(lab: Lab) -> None:
    size = 5_000_000
    before = lab.counters()
    seconds = transfer(lab, size)
    after = lab.counters()
    sent = after["a"] - before["a"]
    received = after["b"] - before["b"]
    assert size < sent.bytes_sent < 1.2 * size
    assert size < received.bytes_received < 1.2 * size
    assert sent.bytes_received < 0.1 * size
    assert sent.packets_sent > 0
    # 0.4 s less the bucket of a millisecond on each side: no machine can be faster.
    assert seconds > 0.39


def test_ssh_reaches_a_host_as_it_would_a_real_one(lab: Lab) -> None:
    assert output(lab, "ssh -x -o BatchMode=yes root@b hostname") == "b"
    assert output(lab, "ssh 10.77.0.2 hostname") == "b"
    assert output(lab, "ssh b exit 7; echo $?") == "7"
    assert output(lab, "echo hello | ssh b cat") == "hello"
    assert output(lab, "ssh b 'echo $0 \"$PACELINE_LAB_HOST\"'") == "/bin/sh b"
    assert "Could not resolve hostname c" in output(lab, "ssh c true; test $? = 255 && echo same")
    secret = lab.run(
        ["ssh", "b", "env"], env={"ONLY_HERE": "1"}, capture_output=True, timeout=600
    ).stdout.decode()
    assert "ONLY_HERE" not in secret
    assert "GLOO_SOCKET_IFNAME=eth0" in secret


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # As horovodrun writes it.
        ("-o StrictHostKeyChecking=no b   -o ConnectTimeout=5 hostname", "b"),
        ("b -p 22 -i /none -tt hostname", "b"),
        ("-xnp22 -lroot b echo -o x", "-o x"),  # the command's own options
        ("b -- echo -x", "-x"),
        ("-- b echo -x", "-x"),
        ("-- b -p22 echo no 2>&1 | grep -c no", "0"),  # after -- it is the command, and a wrong one
    ],
)
def test_ssh_takes_options_behind_the_host_as_openssh_does(lab: Lab, words: str, said: str) -> None:
    assert output(lab, f"ssh {words}").splitlines()[-1] == said


def test_ssh_refuses_an_option_that_openssh_does_not_have(lab: Lab) -> None:
    said = output(lab, "ssh b -z true 2>&1; test $? = 255 && echo same")
    assert "option -z not recognized" in said
    assert said.endswith("same")


def test_the_hosts_file_lists_every_host(lab: Lab) -> None:
    hosts = tomllib.loads(output(lab, 'cat "$PACELINE_LAB_HOSTS"'))["host"]
    assert hosts[1] == {
        "name": "b",
        "address": "10.77.0.2",
        "slots": 1,
        "role": "worker",
        "interface": "eth0",
    }


def test_exit_codes_and_signals(lab: Lab) -> None:
    assert lab.run(["sh", "-c", "exit 3"]).returncode == 3
    process = lab.start(["sleep", "60"], on="b")
    assert process.poll() is None
    process.terminate()
    assert process.wait(PATIENCE) == -15
    with pytest.raises(ConfigError, match="cannot start 'no-such-program' on host 'a'"):
        lab.start(["no-such-program"])
    with pytest.raises(ConfigError, match="unknown host 'c'"):
        lab.start(["true"], on="c")
    with pytest.raises(subprocess.TimeoutExpired):
        lab.run(["sleep", "60"], timeout=0.2)
    # The one that ran out of time was killed, not left.
    assert "sleep 60" not in output(lab, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")


def test_congestion_control_is_that_of_most_hosts_not_of_this_machine(lab: Lab) -> None:
    setting = "cat /proc/sys/net/ipv4/tcp_congestion_control"
    before = Path(setting.split()[1]).read_text()
    assert output(lab, setting) in ("cubic", "reno")
    assert output(lab, setting, on="b") in ("cubic", "reno")
    assert Path(setting.split()[1]).read_text() == before


def test_packets_stay_in_order_and_are_few(lab: Lab) -> None:
    cores = int(output(lab, "cat /sys/class/net/eth0/queues/rx-0/rps_cpus").replace(",", ""), 16)
    assert cores == (1 << (os.cpu_count() or 1)) - 1
    # At 100 Mbit/s a burst of a millisecond is 12.5 kB.
    assert "gso_max_size 11250 " in output(lab, "ip -d link show dev eth0")


def test_many_short_processes_and_signals_do_not_upset_a_host(lab: Lab) -> None:
    for _ in range(100):
        process = lab.start(["sleep", "60"], on="b")
        process.kill()
        process.terminate()
        assert process.wait(PATIENCE) == -9
    assert output(lab, "hostname", on="b") == "b"


BUSY = """
import os
print(len(os.sched_getaffinity(0)), flush=True)
while True: pass
"""


def test_a_quota_limits_the_cpu_and_visible_cores_hold(make_lab: MakeLab) -> None:
    """The kernel itself counts how often a quota ran out: nothing here looks at a clock."""
    lab = make_lab({"name": "a", "cores": 0.25}, "b")
    processes = [lab.start([*PYTHON, BUSY], on=name, stdout=subprocess.PIPE) for name in "ab"]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
    until(lambda: (lab.usage()["a"].throttled_periods or 0) >= 5)
    until(lambda: (lab.usage()["b"].cpu_seconds or 0) > 0)
    for process in processes:
        process.kill()
        assert process.wait(PATIENCE) == -9
        process.close()
    assert lab.usage()["b"].throttled_periods == 0


def test_a_host_cannot_leave_its_cores(make_lab: MakeLab) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one core: there is nowhere to escape to")
    lab = make_lab("a", "b")
    script = (
        "import os; os.sched_setaffinity(0, range(os.cpu_count())); print(os.sched_getaffinity(0))"
    )
    seen = [output(lab, f'{sys.executable} -I -S -c "{script}"', on=host) for host in "ab"]
    first, second = sorted(os.sched_getaffinity(0))[:2]
    assert seen == [str({first}), str({second})]


def test_a_memory_limit_kills_what_exceeds_it(make_lab: MakeLab) -> None:
    lab = make_lab({"name": "a", "memory": "64mib"}, "b")
    eat = [*PYTHON, "data = bytearray(200_000_000); print(len(data))"]
    assert lab.run(eat, on="a", capture_output=True, timeout=600).returncode == -9
    assert lab.run(eat, on="b", capture_output=True, timeout=600).returncode == 0
    assert output(lab, "hostname", on="a") == "a"  # the host itself survives


def test_a_delay_is_added_to_what_each_host_sends(make_lab: MakeLab) -> None:
    if not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("no /dev/net/tun: links cannot be delayed here")
    lab = make_lab("a", {"name": "b", "delay": "10ms"}, delay="30ms", rate="100mbit")
    assert transfer(lab, 1, rounds=5) > 5 * 0.040
    assert transfer(lab, 2_000_000) > 0.16 + 0.040
    assert lab.relay_seconds() is not None
    assert lab.counters()["a"].bytes_sent > 2_000_000


def test_cut_restore_and_throttle(make_lab: MakeLab) -> None:
    lab = make_lab("a", "b", rate="100mbit")
    transfer(lab, 1)
    lab.cut("b")
    reach = [*PYTHON, "import socket; socket.create_connection(('b', 7000), timeout=1)"]
    failed = lab.run(reach, on="a", capture_output=True, timeout=600)
    assert b"timed out" in failed.stderr
    assert "Connection timed out" in output(lab, "ssh -o ConnectTimeout=0.1 b true", on="a")
    lab.restore("b")
    transfer(lab, 1)
    lab.throttle("b", "8mbit")
    assert transfer(lab, 500_000) > 0.48
    lab.restore("b")
    assert "rate 100Mbit" in output(lab, "tc qdisc show dev eth0", on="b")


def test_pause_and_resume(make_lab: MakeLab) -> None:
    lab = make_lab("a", "b")
    process = lab.start(["sleep", "60"], on="b")
    other = lab.start(["sleep", "61"], on="b")

    def states() -> str:
        pids = f"/proc/{process.pid}/stat /proc/{other.pid}/stat"
        return output(lab, f"cut -d ' ' -f 3 {pids}", on="b").replace("\n", " ")

    # A signal is taken when its process is next scheduled, not when it is sent.
    assert lab.pause("b", "sleep 61") == 1
    until(lambda: states() == "S T")
    assert lab.pause("b") == 2
    until(lambda: states() == "T T")
    assert lab.resume("b") == 2
    until(lambda: states() == "S S")


LISTENER = """
import socket, sys
server = socket.create_server(("", 7001))
print("ready", flush=True)
connection, _ = server.accept()
print("joined", flush=True)
connection.settimeout(float(sys.argv[1]))
try:
    print(repr(connection.recv(1)), flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""
CALLER = "import socket, time; c = socket.create_connection(('a', 7001)); time.sleep(60)"


@pytest.mark.parametrize(
    ("fault", "seen", "listens"),
    [("kill", b"TimeoutError\n", 1.5), ("shutdown", b"b''\n", PATIENCE)],
)
def test_a_lost_host_is_silent_or_says_goodbye(
    make_lab: MakeLab, fault: str, seen: bytes, listens: float
) -> None:
    lab = make_lab("a", "b")
    words = [*PYTHON, LISTENER, str(listens)]
    listener = lab.start(words, on="a", stdout=subprocess.PIPE)
    assert listener.stdout is not None
    assert listener.stdout.readline() == b"ready\n"
    caller = lab.start([*PYTHON, CALLER], on="b")
    assert listener.stdout.readline() == b"joined\n"
    before = lab.counters()["b"]
    getattr(lab, fault)("b")
    assert caller.wait(PATIENCE) == -9
    assert listener.stdout.readline() == seen
    listener.wait(PATIENCE)
    listener.close()
    with pytest.raises(RunError, match="host 'b'"):
        lab.run(["true"], on="b")
    assert "No route to host" in output(lab, "ssh -o ConnectTimeout=0.1 b true", on="a")
    assert lab.counters()["b"].bytes_sent >= before.bytes_sent  # the last ones are kept


def test_ssh_to_a_host_without_power_hangs_as_a_real_one_does(make_lab: MakeLab) -> None:
    lab = make_lab("a", "b")
    alive = ["-o", "ServerAliveInterval=0.2", "-o", "ServerAliveCountMax=2"]
    patient = lab.start(["ssh", "b", "sleep 60"], on="a")
    checking = lab.start(["ssh", *alive, "b", "sleep 60"], on="a", stderr=subprocess.PIPE)
    while output(lab, "cat /proc/[0-9]*/cmdline", on="b").count("sleep\x0060") < 2:
        assert patient.poll() is None
    lab.kill("b")
    assert checking.wait(PATIENCE) == 255
    assert checking.stderr is not None
    assert b"Timeout, server b not responding" in checking.stderr.read()
    checking.close()
    assert patient.poll() is None


SUMS = """
import sys
import numpy
from mpi4py import MPI
world = MPI.COMM_WORLD
names = world.allgather(MPI.Get_processor_name())
data = numpy.arange(500_000, dtype=numpy.float32) % 97 + world.rank
total = numpy.empty_like(data)
world.Allreduce(data, total)
expected = (numpy.arange(500_000) % 97) * world.size + sum(range(world.size))
assert numpy.array_equal(total, expected), (world.rank, total[:5], expected[:5])
if world.rank == 0:
    print(world.size, "right on", *names)
"""


@pytest.mark.mpi
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, 4])
def test_mpiexec_sums_right_across_hosts(make_lab: MakeLab, count: int) -> None:
    pytest.importorskip("mpi4py", reason="MPI across hosts needs mpi4py")
    names = list("abcd"[:count])
    cores = min(1.0, 2 / count)
    lab = make_lab(*({"name": name, "cores": cores} for name in names), rate="1gbit")
    command = ["mpiexec", "-n", str(count), "-H", ",".join(names), sys.executable, "-c", SUMS]
    done = lab.run(command, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().split() == [str(count), "right", "on", *names]
    # Whatever the algorithm, the others need a host's 2 MB and the host needs their sum.
    for name, counters in lab.counters().items():
        assert counters.bytes_sent > 2_000_000, name
        assert counters.bytes_received > 2_000_000, name


@pytest.mark.mpi
def test_the_same_mpiexec_line_works_on_plain_hosts(make_lab: MakeLab) -> None:
    pytest.importorskip("mpi4py", reason="MPI needs mpi4py")
    lab = make_lab("a", "b", plain=True)
    command = ["mpiexec", "-n", "2", "-H", "a,b", sys.executable, "-c", SUMS]
    done = lab.run(command, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"2 right on")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("-n 2 -H a,b python -H x", "-n 2 python -H x"),
        ("--hostfile h --mca btl tcp -n 4 prog", "--mca btl tcp -n 4 prog"),
        ("-host a:2 --oversubscribe prog -n 3", "--oversubscribe prog -n 3"),
        ("-x PATH --map-by slot:PE=1 -hosts a,b prog", "-x PATH --map-by slot:PE=1 prog"),
    ],
)
def test_plain_mpiexec_forgets_hosts_and_nothing_else(given: str, kept: str) -> None:
    assert without_hosts(given.split()) == kept.split()


GLOO = """
import datetime, os, sys, torch, torch.distributed as dist
rank, deadline = int(sys.argv[1]), datetime.timedelta(seconds=300)
store = dist.TCPStore("10.77.0.1", 29500, 2, rank == 0, timeout=deadline)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=deadline)
data = torch.arange(500_000.0) + rank
dist.all_reduce(data)
assert torch.equal(data, torch.arange(500_000.0) * 2 + 1)
dist.barrier()
print("right")
"""


@pytest.mark.timeout(900)
def test_gloo_crosses_the_link(lab: Lab) -> None:
    before = lab.counters()
    first = lab.start([sys.executable, "-c", GLOO, "0"], on="a")
    second = lab.run([sys.executable, "-c", GLOO, "1"], on="b", capture_output=True, timeout=600)
    assert second.stdout == b"right\n", second.stderr
    assert first.wait(PATIENCE) == 0
    first.close()
    for host, counters in lab.counters().items():
        assert (counters - before[host]).bytes_sent > 0.9 * 2_000_000


def test_two_labs_at_once_do_not_meet(lab: Lab, make_lab: MakeLab) -> None:
    other = make_lab("a", "c")
    assert output(other, "getent hosts c", on="a").split() == ["10.77.0.2", "c"]
    assert output(lab, "getent hosts b", on="a").split() == ["10.77.0.2", "b"]


def test_more_cores_than_there_are_is_said(make_lab: MakeLab) -> None:
    wanted = len(os.sched_getaffinity(0)) + 1
    lab = make_lab(*(f"host-{number}" for number in range(wanted)))
    assert len(lab.warnings) == 1
    assert f"have {wanted} cores together but this machine has {wanted - 1}" in lab.warnings[0]


def test_a_closed_lab_stays_closed() -> None:
    skip_without_namespaces()
    lab = Lab(LabSpec.from_tables({"host": [{"name": "a"}]})).open()
    pid = lab.start(["sleep", "60"]).pid
    assert pid > 1
    before = leftovers_of(os.getpid())
    lab.close()
    lab.close()
    gone = [thing for thing in before if thing not in leftovers_of(os.getpid())]
    assert any(thing.startswith("process") for thing in gone)
    assert any("/cgroup/" in thing for thing in gone)
    with pytest.raises(RunError, match="not open"):
        lab.run(["true"])
