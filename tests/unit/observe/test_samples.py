"""Resource samples say what really happens, in the process's own network namespace."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from paceline.observe import samples
from paceline.observe.samples import (
    ResourceSampler,
    make_sampler,
    process_began,
    read_disk,
    read_network,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")


def test_cpu_is_what_the_process_used_over_what_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = types.SimpleNamespace(perf_counter=lambda: 10.0, process_time=lambda: 1.0)
    monkeypatch.setattr(samples, "time", clock)
    sampler = ResourceSampler()
    clock.perf_counter, clock.process_time = (lambda: 10.5), (lambda: 1.75)
    assert sampler(1.0).cpu == 1.5  # a core and a half were busy
    clock.perf_counter = lambda: 12.5
    assert sampler(2.0).cpu == 0.0  # it slept
    assert sampler(2.0).cpu == 0.0  # no time passed at all


def test_parts_of_the_machine_sum_to_one() -> None:
    sampler = ResourceSampler()
    time.sleep(0.2)
    sample = sampler(5.0)
    assert sample.time == 5.0
    assert sample.busy + sample.idle + sample.iowait == pytest.approx(1.0)
    assert all(0 <= part <= 1 for part in (sample.busy, sample.idle, sample.iowait))


GROWING = """
import json, os, threading
from paceline.observe.samples import ResourceSampler
sampler = ResourceSampler()
before = sampler(0.0)
block = bytearray(os.urandom(1)) * 200_000_000
release = threading.Event()
threads = [threading.Thread(target=release.wait) for _ in range(3)]
for thread in threads:
    thread.start()
after = sampler(1.0)
release.set()
print(json.dumps([after.resident - before.resident, after.threads - before.threads]))
"""


def test_memory_and_threads_grow_with_what_is_taken() -> None:
    # In a process of its own: what threads of libraries come and go here is not known.
    words = [sys.executable, "-c", GROWING]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
    resident, threads = json.loads(done.stdout)
    assert resident > 100_000_000
    assert threads == 3


def test_traffic_over_the_loopback_is_counted() -> None:
    sampler = ResourceSampler()
    before = sampler(0.0).network["lo"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(20):
                sender.sendto(bytes(1000), receiver.getsockname())
                receiver.recv(2000)
    after = sampler(1.0).network["lo"]
    assert after.bytes_sent - before.bytes_sent >= 20_000
    assert after.packets_sent - before.packets_sent >= 20
    assert after.bytes_received - before.bytes_received >= 20_000
    assert after.packets_received - before.packets_received >= 20


def test_another_network_namespace_shows_its_own_interfaces() -> None:
    script = (
        "import json, sys\n"
        "from paceline.observe.samples import make_sampler\n"
        "s = make_sampler()(0.0)\n"
        "print(json.dumps({n: t.bytes_received for n, t in s.network.items()}))\n"
    )
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if "unshare" in done.stderr:
        pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).get("lo") == 0


def test_written_bytes_are_counted(tmp_path: Path) -> None:
    if read_disk(Path("/proc/self/io")) == (0, 0) and not os.access("/proc/self/io", os.R_OK):
        pytest.skip("/proc/self/io is not shown here")
    before = make_sampler()(0.0).disk_written  # type: ignore[misc]
    with (tmp_path / "file").open("wb") as file:
        file.write(os.urandom(3_000_000))
        file.flush()
        os.fsync(file.fileno())
    after = make_sampler()(1.0).disk_written  # type: ignore[misc]
    kind = os.statvfs(tmp_path)
    if after == before:
        pytest.skip(f"the file system of the test counts no bytes written ({kind})")
    assert after - before >= 3_000_000


def test_the_process_began_before_its_first_line() -> None:
    before = time.time()
    script = "import time; from paceline.observe.samples import process_began as b; print(b())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True
    )
    after = time.time()
    assert before - 0.05 <= float(done.stdout) <= after
    assert process_began() <= before


def test_what_is_not_shown_is_empty(tmp_path: Path) -> None:
    assert read_network(tmp_path / "nothing") == {}
    assert read_disk(tmp_path / "nothing") == (0, 0)
    with pytest.raises(OSError, match="No such file"):
        ResourceSampler(tmp_path)
