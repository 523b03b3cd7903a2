"""Loops of one's own whose gradients are compressed between hosts, and nowhere else."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_own_loop import BESIDE, SCRIPT, TOLERANCE, difference, needs_mpi, plainly, start

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = [pytest.mark.timeout(900), pytest.mark.world_size(4)]
KINDS = "ignored,norm,gan,twice,rare"
SLIGHTLY = 0.05
"""Of weights around 1: what five or fifteen compressed updates may change."""
WHOLE = 15 * (6 * 8 + 8 + 8 * 12 + 12) * 4
"""Bytes that each of two hosts sends in the fifteen updates of the first kind, uncompressed."""


def sent(output: str) -> dict[int, list[int]]:
    """Bytes that each rank has sent to other hosts, of one kind after the other."""
    found: dict[int, list[int]] = {}
    for rank, count in re.findall(r"rank (\d+) sent (\d+)", output):
        found.setdefault(int(rank), []).append(int(count))
    return found


@pytest.mark.parametrize(
    ("ranks", "per_host", "compression"),
    [
        (2, 1, "powersgd"),
        *(pytest.param(*case, marks=pytest.mark.slow)
          for case in ((2, 1, "bf16"), (4, 2, "bf16"), (4, 2, "powersgd"), (4, 1, "bf16"),
                       (4, 1, "powersgd"))),
    ],
)  # fmt: skip
def test_fewer_bytes_between_hosts_and_nearly_the_same_weights(
    run_cli: Cli, tmp_path: Path, ranks: int, per_host: int, compression: str
) -> None:
    """All ranks end with the same weights, bit for bit, which the script sees to."""
    expected = plainly(tmp_path, KINDS)
    words = ("--apart", "--per-host", str(per_host), "--compression", compression)
    done = run_cli("run", "--nproc", str(ranks), SCRIPT, KINDS, "out.pt", *words)
    assert done.returncode == 0, done.stderr
    assert TOLERANCE < difference(expected, tmp_path / "out.pt") < SLIGHTLY
    found = sent(done.stdout)
    if ranks // per_host == 2:  # more hosts send more
        # By PowerSGD of rank 1 after ten updates: 14 and 20 numbers for 48 and 96.
        vectors = WHOLE // 3 * 2 + 5 * (6 + 8 + 8 + 8 + 12 + 12) * 4
        assert found[0][0] == (WHOLE // 2 if compression == "bf16" else vectors)
    for rank, counts in found.items():
        assert all((count > 0) == (rank % per_host == 0) for count in counts)


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("compression", ["bf16", "powersgd"])
def test_over_mpi(tmp_path: Path, compression: str) -> None:
    expected = plainly(tmp_path, KINDS)
    start(
        tmp_path, BESIDE / "mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", 4,
        sys.executable, SCRIPT, KINDS, "out.pt", "--apart", "--per-host", 2,
        "--compression", compression,
    )  # fmt: skip
    assert TOLERANCE < difference(expected, tmp_path / "out.pt") < SLIGHTLY


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_on_one_host_nothing_is_compressed(run_cli: Cli, tmp_path: Path, ranks: str) -> None:
    expected = plainly(tmp_path, "ignored")
    done = run_cli("run", "--nproc", ranks, SCRIPT, "ignored", "out.pt", "--compression", "bf16")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compression='bf16' has no effect") == 1
    assert difference(expected, tmp_path / "out.pt") < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["bf16", "powersgd"])
def test_what_compressing_takes_off_comes_back_after_a_resume(
    run_cli: Cli, tmp_path: Path, compression: str
) -> None:
    """Bit for bit, with two hosts of two ranks."""

    def trained(out: str, *words: str) -> None:
        fixed = ("--apart", "--per-host", "2", "--compression", compression, "--epochs", "4",
                 "--shares", "2,1,1,1")  # fmt: skip
        done = run_cli("run", "--nproc", "4", SCRIPT, "norm,rare", out, *fixed, *words)
        assert done.returncode == 0, done.stderr

    trained("whole.pt", "--run", "whole")
    trained("out.pt", "--run", "mine", "--stop", "3")
    for kind in ("norm", "rare"):
        saved = load_file(
            tmp_path / "mine" / kind / "checkpoints" / "latest" / "optimizer.safetensors"
        )
        errors = [saved[f".exchange|{host}/error-0"] for host in (0, 1)]
        assert not errors[0].equal(errors[1])
        assert all(bool(error.any()) for error in errors) or kind == "rare"
    trained("out.pt", "--run", "mine")
    assert difference(torch.load(tmp_path / "whole.pt"), tmp_path / "out.pt") == 0.0


@pytest.mark.slow
def test_a_run_goes_on_as_it_began_or_not_at_all(run_cli: Cli, tmp_path: Path) -> None:
    words = ("ignored", "out.pt", "--run", "mine", "--epochs", "4")
    done = run_cli("run", "--nproc", "2", SCRIPT, *words, "--stop", "1", "--compression", "bf16")
    assert done.returncode == 0, done.stderr
    done = run_cli("run", "--nproc", "2", SCRIPT, *words)
    assert done.returncode != 0
    assert "exchange.compression (was 'bf16', now 'none')" in done.stderr


def test_a_gradient_that_is_not_finite_ends_the_run(run_cli: Cli, tmp_path: Path) -> None:
    """What compressing takes off such a gradient would come back for ever."""
    (tmp_path / "script.py").write_text(
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import own_loop, paceline, torch\n"
        "own_loop.be_apart()\n"
        "pace = paceline.Pace(compression='bf16')\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "data = torch.ones(24, 2)\n"
        "data[15] = float('inf')\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=4)\n"
        "model, optimizer, loader = pace.prepare(model, optimizer, loader)\n"
        "for epoch in pace.epochs(1):\n"
        "    for batch in loader:\n"
        "        pace.backward(model(batch).square().mean())\n"
        "        optimizer.step()\n"
    )
    done = run_cli("run", "--nproc", "2", "script.py")
    assert done.returncode != 0
    assert "rank 1 on 1 has a gradient in update 4 of which" in done.stderr
    assert "the training has diverged" in done.stderr
