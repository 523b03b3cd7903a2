"""`paceline.Pace`: loops of one's own against plain ones in one process, whoever starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from own_loop import KINDS  # noqa: E402

from paceline.launch.checks import free_port  # noqa: E402

SCRIPT = HERE / "own_loop.py"
BESIDE = Path(sys.executable).parent
Cli = Callable[..., "subprocess.CompletedProcess[str]"]
TOLERANCE = 3e-6
"""Of weights around 1 after fifteen updates: sums in another order."""
needs_mpi = pytest.mark.skipif(
    not (BESIDE / "mpiexec").exists(), reason="no mpiexec here: pip install 'paceline[mpi]'"
)
pytestmark = [pytest.mark.timeout(900), pytest.mark.world_size(2)]


def start(folder: Path, *words: Any, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def plainly(folder: Path, kinds: str, *words: str) -> dict[str, torch.Tensor]:
    """Of each kind, what one process without Paceline makes of the same batches."""
    start(folder, sys.executable, SCRIPT, kinds, "plain.pt", "--plain", *words)
    found: dict[str, torch.Tensor] = torch.load(folder / "plain.pt")
    return found


def difference(expected: dict[str, torch.Tensor], path: Path) -> float:
    """The largest of any weight of any kind, which is printed."""
    found = torch.load(path)
    assert found.keys() == expected.keys()
    apart = {name: float((found[name] - expected[name]).abs().max()) for name in expected}
    worst = max(apart, key=lambda name: apart[name])
    print(f"{path.name}: {apart[worst]:.2g} in {worst}")
    return apart[worst]


QUICK = ("ignored", "norm", "gan", "shuffled", "stream", "twice", "rare")
"""The others differ from these in less; they are in make test-slow."""
REST = tuple(kind for kind in KINDS if kind not in QUICK)


@pytest.mark.parametrize("kinds", [QUICK, pytest.param(REST, marks=pytest.mark.slow)])
def test_ranks_have_the_weights_of_one_process(
    run_cli: Cli, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    """Alone bit for bit; on two ranks; and on two as between hosts, whose gradients leave early."""
    every = ",".join(kinds)
    expected = plainly(tmp_path, every)
    start(tmp_path, sys.executable, SCRIPT, every, "out.pt")
    assert difference(expected, tmp_path / "out.pt") == 0.0
    for apart in ((), ("--apart",)):
        done = run_cli("run", "--nproc", "2", SCRIPT, every, "out.pt", "--shares", "3,1", *apart)
        assert done.returncode == 0, done.stderr
        assert difference(expected, tmp_path / "out.pt") < TOLERANCE


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_so_do_four(run_cli: Cli, tmp_path: Path) -> None:
    every = ",".join(kind for kind in KINDS if kind != "stream")  # its rest is 3
    expected = plainly(tmp_path, every)
    done = run_cli("run", "--nproc", "4", SCRIPT, every, "out.pt")
    assert done.returncode == 0, done.stderr
    assert difference(expected, tmp_path / "out.pt") < TOLERANCE


@needs_mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_over_mpi(tmp_path: Path, ranks: int) -> None:
    expected = plainly(tmp_path, "ignored,norm,gan")
    start(
        tmp_path, BESIDE / "mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", ranks,
        sys.executable, SCRIPT, "ignored,norm,gan", "out.pt",
    )  # fmt: skip
    assert difference(expected, tmp_path / "out.pt") < TOLERANCE


def test_under_torchrun(tmp_path: Path) -> None:
    expected = plainly(tmp_path, "ignored")
    words = ("--nproc-per-node", "2", "--master-port", free_port(), SCRIPT)
    start(tmp_path, BESIDE / "torchrun", *words, "ignored", "out.pt")
    assert difference(expected, tmp_path / "out.pt") < TOLERANCE


def test_under_srun(tmp_path: Path) -> None:
    """What srun sets for its tasks, without Slurm."""
    expected = plainly(tmp_path, "ignored")
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
           "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}  # fmt: skip
    tasks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, "ignored", "out.pt"],
            cwd=tmp_path,
            env=os.environ | job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [task.wait(timeout=600) for task in tasks] == [0, 0]
    assert difference(expected, tmp_path / "out.pt") < TOLERANCE
