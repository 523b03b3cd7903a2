"""Trainings on real Ray and Spark clusters, each on two emulated hosts. `make test-engines`."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.lab import Lab
from paceline.lab.process import LabProcess
from paceline.lab.testing import lab_spec, make_lab, skip_without_namespaces
from paceline.schema.legs import read_legs

sys.path.insert(0, str(Path(__file__).parent))
from clusters import KINDS, TestedCluster, wait

__all__ = ["make_lab"]
pytestmark = [pytest.mark.lab, pytest.mark.slow]
MODULES = {"ray": "ray", "spark": "pyspark"}
INSTALLED = [kind for kind, module in MODULES.items() if importlib.util.find_spec(module)]
if not INSTALLED:
    pytest.skip("neither Ray nor PySpark is installed here", allow_module_level=True)
PACELINE = [sys.executable, "-m", "paceline.cli", "train"]
HOSTS = [{"name": name, "cores": 1.0} for name in "ab"]
SETTINGS = {
    "workload.model": "shallow_cnn",
    "workload.data": "synthetic",
    "workload.batch_size": 32,
    "data.options": "{ shape = [1, 28, 28], samples = 160, test_samples = 32 }",
    "train.epochs": 2,
    "local.strategy": "threads",
    "local.threads": 1,
    "exchange.rebalance": "false",
}
PACED = Path(__file__).parents[1] / "parity" / "leg_models.py"


def words(run: Path, **changes: object) -> list[str]:
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    found = [word for pair in settings.items() for word in ("--set", f"{pair[0]}={pair[1]}")]
    return ["--run", str(run), *found]


def opened(kind: str, lab: Lab) -> Iterator[TestedCluster]:
    cluster = KINDS[kind](lab)
    try:
        yield cluster.open()
    finally:
        cluster.close()


@pytest.fixture(scope="module", params=INSTALLED)
def cluster(request: pytest.FixtureRequest) -> Iterator[TestedCluster]:
    """Two hosts that several tests use."""
    skip_without_namespaces()
    with Lab(lab_spec(*HOSTS, rate="1gbit")) as lab:
        yield from opened(request.param, lab)


@pytest.fixture(params=INSTALLED)
def broken_cluster(
    request: pytest.FixtureRequest, make_lab: Callable[..., Lab]
) -> Iterator[TestedCluster]:
    """Two hosts of which a test may kill one."""
    yield from opened(request.param, make_lab(*HOSTS, rate="1gbit"))


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["test_loss"] for line in lines if "test_loss" in line]


def test_two_hosts_train_together(cluster: TestedCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = [*PACELINE, *cluster.words(), "--nodes", "2", *words(run)]
    done = cluster.run(line)
    output = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, output
    assert f"2 nodes by {cluster.engine}, over gloo" in output
    assert "[a rank 0] epoch 2/2" in output
    plan = json.loads((run / "plan.json").read_text())
    assert [node["host"] for node in plan["nodes"]] == ["a", "b"]
    assert json.loads((run / "run.json").read_text())["finished"]
    alone = tmp_path / "alone"
    subprocess.run([*PACELINE, *words(alone)], check=True, capture_output=True, timeout=600)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
    for name in ("a", "b"):
        left = cluster.lab.run(
            ["sh", "-c", "cat /proc/[0-9]*/cmdline"], on=name, capture_output=True
        )
        assert b"paceline.launch.agent" not in left.stdout


def test_from_python(cluster: TestedCluster, tmp_path: Path) -> None:
    """As a notebook does it."""
    *_, address = cluster.words()
    settings = {key: value for key, value in SETTINGS.items() if key.startswith(("local", "exch"))}
    program = f"""
import paceline
result = paceline.train(
    paceline.Workload(model="mnist_cnn", data="digits"),
    epochs=1,
    engine={cluster.engine!r},
    address={address!r},
    nodes=2,
    run={str(tmp_path / "run")!r},
    settings={settings | {"exchange.rebalance": False}!r},
)
print("done", result.exit_code, sorted(result.summary)[:1])
"""
    done = cluster.run([sys.executable, "-c", program])
    assert b"done 0" in done.stdout, done.stdout + done.stderr


def test_more_nodes_than_there_are(cluster: TestedCluster, tmp_path: Path) -> None:
    if cluster.engine == "spark":
        pytest.skip("Spark waits for minutes: executors may still come")
    line = [*PACELINE, *cluster.words(), "--nodes", "3", *words(tmp_path / "run")]
    done = cluster.run(line)
    assert done.returncode == 2, done.stdout + done.stderr
    assert b"--nodes 3: the cluster at --" in done.stderr
    assert b"has 2 with a free CPU: ask for fewer, or add some" in done.stderr
    assert not (tmp_path / "run").exists()


def start(cluster: TestedCluster, line: list[str], log: Path) -> LabProcess:
    with log.open("wb") as output:
        stream = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        return cluster.lab.start(line, on="a", env=cluster.environment, **stream)


def await_text(pattern: str, process: LabProcess, log: Path) -> None:
    wait(lambda: re.search(pattern, log.read_text()) or process.poll() is not None, log, 600)
    assert re.search(pattern, log.read_text()), log.read_text()


def test_ctrl_c_stops_in_order(cluster: TestedCluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = [*PACELINE, *cluster.words(), "--nodes", "2", *words(tmp_path / "run")]
    process = start(cluster, [*line, "--set", "train.epochs=100000"], log)
    try:
        await_text("epoch 2/", process, log)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130, log.read_text()
    finally:
        process.close()
    assert "stopped and saved; continue with: " in log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_killed_node(broken_cluster: TestedCluster, tmp_path: Path) -> None:
    """Ray: the other goes on. Spark ends all tasks: they are started again on the other."""
    run, log = tmp_path / "run", tmp_path / "log"
    changes = {
        "workload__model": f"{PACED}:paced_by_cores",
        "data__options": "{ shape = [1, 28, 28], samples = 1600, test_samples = 32 }",
        "local__strategy": "auto",
        "train__epochs": 1,
        "train__silence": 8,
        "train__checkpoint_seconds": 2,
        "pilot__budget": 1.0,
    }
    settings = words(run, **changes)
    place = settings.index("local.threads=1")
    del settings[place - 1 : place + 1]
    line = [*PACELINE, *broken_cluster.words(), "--nodes", "2", "-v", *settings]
    process = start(broken_cluster, line, log)
    try:
        await_text("from here with a and b", process, log)
        broken_cluster.lab.kill("b")
        code = process.wait(900)
    finally:
        process.close()
    text = log.read_text()
    assert code == 0, text
    assert "host b (rank 1) has not been heard of" in text
    assert json.loads((run / "run.json").read_text())["finished"]
    assert "Traceback" not in text
    legs = read_legs(run / "legs.jsonl")
    assert [node.host for node in legs[-1].plan.nodes] == ["a"], text
    assert sum(leg.updates for leg in legs) >= 50
    assert ("starting again from update" in text) == (broken_cluster.engine == "spark"), text
