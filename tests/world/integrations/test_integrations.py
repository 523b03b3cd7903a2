"""Lightning, Accelerate and transformers as they are: unequal shares, the weights of one process.

`make test` does not install these packages: each test says what it needs, and docs/integrations.md
how to make an environment for each.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
Cli = Callable[..., "subprocess.CompletedProcess[str]"]
PACKAGES = {"lightning": "lightning", "huggingface": "transformers", "accelerate": "accelerate"}
QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
TOLERANCE = 2e-6
"""Of weights around 1 after ten updates: sums in another order."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.world_size(2)]


def needs(extra: str) -> pytest.MarkDecorator:
    package = PACKAGES[extra]
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"{package} is not installed: pip install 'paceline[{extra}]'",
    )


def alone(script: str, out: Path, *words: str) -> None:
    """The same script as one process, started without any launcher."""
    done = subprocess.run(
        [sys.executable, HERE / script, "1", out, *words],
        # Lightning starts MPI where it finds mpi4py; alone that needs no shared memory.
        env=os.environ | QUIET | {"OMPI_MCA_btl": "self"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def difference(one: Path, two: Path) -> float:
    first, second = torch.load(one), torch.load(two)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param("lightning_script.py", (), marks=needs("lightning")),
        pytest.param("lightning_script.py", ("--accumulate", "2"), marks=needs("lightning")),
        pytest.param("lightning_script.py", ("--workers", "1"), marks=needs("lightning")),
        pytest.param("accelerate_script.py", (), marks=needs("accelerate")),
        pytest.param("accelerate_script.py", ("--accumulate", "2"), marks=needs("accelerate")),
        pytest.param("huggingface_script.py", (), marks=needs("huggingface")),
        pytest.param("huggingface_script.py", ("--accumulate", "2"), marks=needs("huggingface")),
        pytest.param("huggingface_script.py", ("--tokens",), marks=needs("huggingface")),
    ],
)
def test_weights_are_those_of_one_process(
    run_cli: Cli, tmp_path: Path, script: str, words: tuple[str, ...]
) -> None:
    alone(script, tmp_path / "one.pt", *words)
    done = run_cli("run", "--nproc", "2", HERE / script, "3,1", "two.pt", *words, env=QUIET)
    assert done.returncode == 0, done.stderr
    assert difference(tmp_path / "one.pt", tmp_path / "two.pt") < TOLERANCE


@needs("lightning")
def test_without_the_factor_they_are_not(run_cli: Cli, tmp_path: Path) -> None:
    """The comparison can fail: DDP's plain mean over unequal parts gives other weights."""
    alone("lightning_script.py", tmp_path / "one.pt")
    script = tmp_path / "plain.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\n"
        "from paceline.integrations.shares import Shares\n"
        "Shares.factor = lambda self: 1.0\n"
        "import lightning_script\nlightning_script.main()\n"
    )
    done = run_cli("run", "--nproc", "2", script, "3,1", "two.pt", env=QUIET)
    assert done.returncode == 0, done.stderr
    assert difference(tmp_path / "one.pt", tmp_path / "two.pt") > 1e-3


@pytest.mark.mpi
@pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpiexec").exists(),
    reason="no mpiexec here: pip install 'paceline[mpi]'",
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("lightning", marks=needs("lightning")),
        pytest.param("accelerate", marks=needs("accelerate")),
        pytest.param("huggingface", marks=needs("huggingface")),
    ],
)
def test_over_mpi(tmp_path: Path, name: str) -> None:
    script_file = f"{name}_script.py"
    alone(script_file, tmp_path / "one.pt")
    words = [Path(sys.executable).parent / "mpiexec", "--allow-run-as-root"]
    script = [sys.executable, HERE / script_file, "3,1", tmp_path / "two.pt"]
    done = subprocess.run(
        [*words, "-n", "2", *script, "--backend", "mpi4py"],
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert difference(tmp_path / "one.pt", tmp_path / "two.pt") < TOLERANCE


@pytest.mark.parametrize(
    ("script", "words", "reason"),
    [
        pytest.param("lightning_script.py", ("3,1", "x", "--norm"), "is a BatchNorm1d",
                     marks=needs("lightning")),
        pytest.param("lightning_script.py", ("3,1", "x", "--own-sampler"),
                     "give Trainer use_distributed_sampler=False", marks=needs("lightning")),
        pytest.param("lightning_script.py", ("3,1,1", "x"), "are 3, but there are 2 ranks",
                     marks=needs("lightning")),
        pytest.param("accelerate_script.py", ("3,1", "x", "--norm"), "is a BatchNorm1d",
                     marks=needs("accelerate")),
    ],
)  # fmt: skip
def test_what_would_not_be_exact_is_refused(
    run_cli: Cli, script: str, words: tuple[str, ...], reason: str
) -> None:
    done = run_cli("run", "--nproc", "2", HERE / script, *words, env=QUIET)
    assert done.returncode == 1
    assert reason in done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named(name: str) -> None:
    if importlib.util.find_spec(PACKAGES[name]) is not None:
        pytest.skip(f"{PACKAGES[name]} is installed")
    with pytest.raises(ImportError, match=rf"pip\s+install 'paceline\[{name}\]'"):
        importlib.import_module(f"paceline.integrations.{name}")
