"""Every example in a docstring does what it says."""

from __future__ import annotations

import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text()
)


RUN = """
import doctest, importlib, sys
sys.exit(doctest.testmod(importlib.import_module(sys.argv[1])).failed)
"""


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    if name.startswith("paceline.backends.mpi"):  # MPI stays open in the process that imports it
        pytest.importorskip("mpi4py", reason="MPI is not installed", exc_type=ImportError)
        done = subprocess.run(
            [sys.executable, "-c", RUN, name],
            env=os.environ | {"OMPI_MCA_btl": "self"},  # alone it needs no shared memory
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert doctest.testmod(importlib.import_module(name)).failed == 0
