"""`paceline train --hosts lab` on emulated hosts: real links, ssh, MPI, and a host that dies."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab import Lab
from paceline.lab.process import LabProcess
from paceline.lab.testing import make_lab, skip_without_namespaces
from paceline.schema.legs import read_legs

__all__ = ["make_lab"]
pytestmark = pytest.mark.lab
MakeLab = Callable[..., Lab]
PACELINE = [sys.executable, "-m", "paceline.cli", "train", "--hosts", "lab"]
LEFT = "cat /proc/[0-9]*/cmdline; ls /dev/shm"
SETTINGS = {
    "workload.model": "shallow_cnn",
    "workload.data": "synthetic",
    "workload.batch_size": 32,
    "data.options": "{ shape = [1, 28, 28], samples = 160, test_samples = 32 }",
    "train.epochs": 1,
    "local.strategy": "threads",
    "local.threads": 1,
    "exchange.rebalance": "false",
}


def command(run: Path, engine: str, **changes: object) -> list[str]:
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    words = [word for pair in settings.items() for word in ("--set", f"{pair[0]}={pair[1]}")]
    return [*PACELINE, "--engine", engine, "--run", str(run), *words]


def hosts(count: int) -> list[dict[str, object]]:
    return [{"name": name, "cores": min(1.0, 2 / count)} for name in "abcd"[:count]]


def weights(run: Path) -> str:
    newest = run / "checkpoints" / "latest" / "model.safetensors"
    return hashlib.sha256(newest.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("engine", "backend", "count"),
    [
        pytest.param("auto", "mpi4py", 2, marks=pytest.mark.mpi),
        pytest.param("ssh", "gloo", 4, marks=pytest.mark.slow),
    ],
)
def test_hosts_train_together(
    make_lab: MakeLab, tmp_path: Path, engine: str, backend: str, count: int
) -> None:
    lab = make_lab(*hosts(count), rate="1gbit")
    run = tmp_path / "run"
    done = lab.run(command(run, engine), capture_output=True, timeout=600)
    output = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, output
    assert f"{count} nodes by {'mpi' if engine == 'auto' else engine}, over {backend}" in output
    assert "[a rank 0] epoch 1/1" in output
    plan = json.loads((run / "plan.json").read_text())
    assert [node["host"] for node in plan["nodes"]] == list("abcd"[:count])
    assert json.loads((run / "run.json").read_text())["finished"]
    for counters in lab.counters().values():
        assert counters.bytes_sent > 100_000


def wait_for(text: str, process: LabProcess, log: Path, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not re.search(text, log.read_text()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        pytest.param("mpi", "kill", marks=pytest.mark.mpi),
        pytest.param("ssh", "kill", marks=pytest.mark.slow),
        pytest.param("ssh", "shutdown", marks=pytest.mark.slow),
    ],
)
def test_a_lost_host_ends_the_run_and_is_named(
    make_lab: MakeLab, tmp_path: Path, engine: str, fault: str
) -> None:
    """Long before any collective's deadline of 60 s; about 8 s on a quiet machine."""
    lab = make_lab(*hosts(2), rate="1gbit")
    log = tmp_path / "log"
    changes = {"train__epochs": 100_000, "train__restarts": 0, "train__silence": 6}
    line = command(tmp_path / "run", engine, **changes)
    with log.open("wb") as output:
        process = lab.start(line, on="a", stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        wait_for("epoch 2/", process, log)
        getattr(lab, fault)("b")
        code = process.wait(300)
        process.close()
    text = log.read_text()
    last = text.strip().splitlines()[-1]
    assert code == 1, text
    assert last.startswith("paceline: host b (rank 1) has "), text
    assert " update " in last
    assert "Traceback" not in text
    left = lab.run(["sh", "-c", LEFT], on="a", capture_output=True)
    for name in (b"paceline.launch", b"mpiexec", b"prted", b"mpich_shm", b"segment"):
        assert name not in left.stdout, left.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cell_of_the_bench_of_faults(tmp_path: Path) -> None:
    """Four hosts over MPI, one rank is killed: the table says that nothing was lost."""
    skip_without_namespaces()
    words = [
        sys.executable,
        "-m",
        "paceline.cli",
        "bench",
        "faults",
        "--only",
        "mpi/rank",
        "--json",
    ]
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=800)
    (cell,) = json.loads(done.stdout)
    assert done.returncode == 0, cell
    assert (cell["code"], cell["equal"], cell["orphans"], cell["left"]) == (0, True, [], [])
    assert "rank 2 on host c was killed by SIGKILL" in cell["note"]


def test_hosts_that_do_not_fit_are_refused_before_anything_starts(
    make_lab: MakeLab, tmp_path: Path
) -> None:
    lab = make_lab(*hosts(2))
    toml = (
        Path(lab.hosts_file).read_text().replace('name = "b"', 'name = "b"\npython = "/no/python"')
    )
    (tmp_path / "hosts.toml").write_text(toml)
    line = command(tmp_path / "run", "ssh")
    line[line.index("lab")] = str(tmp_path / "hosts.toml")
    done = lab.run(line, capture_output=True, timeout=600)
    assert done.returncode == 2
    assert b"paceline: host b does not answer: " in done.stderr
    assert b"/no/python" in done.stderr
    assert not (tmp_path / "run").exists()


PACED = Path(__file__).parents[2] / "parity" / "leg_models.py"
FOLLOWS = 30
"""Updates within which shares must have followed a host that has slowed down."""


def shares(run: Path) -> list[tuple[int, float]]:
    """The update that every leg of both hosts began with, and the second one's share of it."""
    found = []
    for leg in read_legs(run / "legs.jsonl"):
        parts = {node.host: node.share for node in leg.plan.nodes}
        if set(parts) == {"a", "b"}:
            found.append((leg.first, parts["b"] / sum(parts.values())))
    return found


@pytest.mark.slow
def test_shares_follow_a_host_that_slows_down(make_lab: MakeLab, tmp_path: Path) -> None:
    """A host whose cores do a quarter in the middle of an epoch, counted in updates."""
    lab = make_lab("a", {"name": "b", "cores": 0.99}, rate="1gbit")
    run, log = tmp_path / "run", tmp_path / "log"
    changes = {
        "workload__model": f"{PACED}:paced_by_cores",
        "data__options": "{ shape = [1, 28, 28], samples = 64000, test_samples = 32 }",
        "local__strategy": "auto",
        "exchange__rebalance": "true",
        "pilot__budget": 1.0,
        "train__steps": 400,
    }
    line = command(run, "ssh", **changes)
    place = line.index("local.threads=1")
    del line[place - 1 : place + 1]
    with log.open("wb") as output:
        process = lab.start(line, on="a", stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        # By the time that it is said, both have trained together.
        wait_for("from here with a and b", process, log)
        slowed = time.time()
        lab.slow("b", 0.25)
        wait_for(r"shares follow the measured speeds: a [78]\d", process, log)
        process.terminate()
        process.wait(120)
        process.close()
    before = updates_before(run, slowed)
    later = [(first, share) for first, share in shares(run) if first > before and share < 0.3]
    assert later, (before, shares(run), log.read_text())
    assert later[0][0] - before <= FOLLOWS, (before, later)
    assert later[0][1] == pytest.approx(0.2, abs=0.08)


def updates_before(run: Path, when: float) -> int:
    """Updates that the first host had begun until then."""
    text = (run / "rank-0" / "events.jsonl").read_text()
    events = [json.loads(line) for line in text.splitlines()]
    done = [e for e in events if e.get("event") == "span" and e["name"] == "compute"]
    return 1 + max(event["update"] for event in done if event["start"] < when)
