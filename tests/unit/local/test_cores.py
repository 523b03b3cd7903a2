"""Which cores a process may use: affinity, and quotas of both kinds of control groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.local import cores
from paceline.local.cores import divide_cores, quota_cores, usable_cores


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def quota(tmp_path: Path, membership: str, files: dict[str, str]) -> float | None:
    (tmp_path / "membership").write_text(membership)
    return quota_cores(tree(tmp_path / "cgroup", files), tmp_path / "membership")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ({"a/b/cpu.max": "max 100000\n"}, None),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ({"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        ({"cpu.max": "100000 100000\n", "a/b/cpu.max": "300000 100000\n"}, 1.0),
        ({"a/b/cpu.max": "nonsense\n"}, None),
        ({"a/b/memory.max": "max\n"}, None),
    ],
)
def test_version_2(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    assert quota(tmp_path, "0::/a/b\n", files) == expected


def test_version_2_inside_a_container_that_does_not_see_its_path(tmp_path: Path) -> None:
    files = {"cpu.max": "250000 100000\n"}
    assert quota(tmp_path, "0::/system.slice/docker-123\n", files) == 2.5
    assert quota(tmp_path, "0::/../../elsewhere\n", files) == 2.5


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(
    ("amount", "above", "expected"),
    [("50000", "-1", 0.5), ("-1", "-1", None), ("300000", "120000", 1.2)],
)
def test_version_1(
    tmp_path: Path, mount: str, amount: str, above: str, expected: float | None
) -> None:
    files = {
        f"{mount}/job/cpu.cfs_quota_us": amount,
        f"{mount}/job/cpu.cfs_period_us": "100000",
        f"{mount}/cpu.cfs_quota_us": above,
        f"{mount}/cpu.cfs_period_us": "100000",
    }
    membership = "12:memory:/job\n4:cpu,cpuacct:/job\n0::/\n"
    assert quota(tmp_path, membership, files) == expected


def test_both_versions_the_strictest_counts(tmp_path: Path) -> None:
    files = {
        "cpu/job/cpu.cfs_quota_us": "200000",
        "cpu/job/cpu.cfs_period_us": "100000",
        "unified/cpu.max": "150000 100000",
    }
    assert quota(tmp_path, "4:cpu:/job\n0::/unified\n", files) == 1.5


def test_no_control_groups(tmp_path: Path) -> None:
    assert quota_cores(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("visible", "limit", "expected"),
    [(8, None, 8), (8, 2.0, 2), (8, 2.1, 3), (2, 0.5, 2), (2, 16.0, 2), (1, 1.0, 1)],
)
def test_usable(
    monkeypatch: pytest.MonkeyPatch, visible: int, limit: float | None, expected: int
) -> None:
    monkeypatch.setattr(cores, "visible_cores", lambda: tuple(range(visible)))
    monkeypatch.setattr(cores, "quota_cores", lambda: limit)
    assert usable_cores() == expected


@given(cores_=st.integers(1, 64), ranks=st.integers(1, 64))
def test_divided_cores_are_disjoint_and_all_used(cores_: int, ranks: int) -> None:
    every = tuple(range(10, 10 + cores_))
    parts = [divide_cores(every, ranks, rank) for rank in range(ranks)]
    assert all(parts)
    if ranks <= cores_:
        assert sum(parts, ()) == every
        sizes = {len(part) for part in parts}
        assert max(sizes) - min(sizes) <= 1
    else:
        assert set(sum(parts, ())) == set(every)


def test_a_process_sees_only_the_cores_it_was_given() -> None:
    last = max(os.sched_getaffinity(0))
    script = "from paceline.local.cores import visible_cores; print(visible_cores())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=lambda: os.sched_setaffinity(0, {last}),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert done.stdout.strip() == f"({last},)"


def test_pin_keeps_every_thread_on_its_cores() -> None:
    # In a process of its own: pinning the tests would slow the rest of them down.
    script = (
        "import os, threading\n"
        "from paceline.local.cores import pin, visible_cores\n"
        "stop = threading.Event()\n"
        "thread = threading.Thread(target=stop.wait); thread.start()\n"
        "chosen = visible_cores()[-1:]\n"
        "pin(chosen)\n"
        "found = {tuple(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')}\n"
        "stop.set(); thread.join()\n"
        "assert found == {chosen}, found\n"
        "pin(())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)
