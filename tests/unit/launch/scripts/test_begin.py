"""A script that `paceline run` starts sees and says what it does when Python is given it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.scripts import begin

TELLS = """
import inspect, multiprocessing, pickle, sys
from dataclasses import dataclass

import beside

count: int = 3

@dataclass
class Point:
    x: int

def double(point):
    return Point(2 * point.x)

if __name__ == "__main__":
    print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
    print(sys.argv, sys.path[0], beside.__file__, __annotations__, sorted(globals()))
    print(inspect.getsource(double), pickle.loads(pickle.dumps(Point(1))))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [Point(4)]))
"""
FAILS = "import sys\n\ndef deep():\n    raise ValueError('the cause')\n\ndeep()\n"
LATE = """
import atexit, sys, threading, time

class Late: pass

def work():
    time.sleep(0.2)
    print(sys.modules["__main__"].Late.__name__)

atexit.register(lambda: print("last", Late))
threading.Thread(target=work).start()
"""


def both(folder: Path, *words: str) -> None:
    """Python alone and with `begin` between print the same and end the same."""
    plain, begun = (
        subprocess.run([sys.executable, *start, *words], cwd=folder, capture_output=True, text=True)
        for start in ([], ["-m", begin.__name__])
    )
    own = "".join(line for line in plain.stderr.splitlines(True) if "<frozen runpy>" not in line)
    assert (begun.stdout, begun.stderr) == (plain.stdout, own)
    assert begun.returncode == plain.returncode


@pytest.mark.parametrize(
    "text", [TELLS, FAILS, LATE, "import sys\nsys.exit(3)", "raise SystemExit('why')", "1 +"]
)
def test_a_script_is_the_main_module(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "beside.py").touch()
    (folder / "script.py").write_text(text)
    both(tmp_path, "own/script.py", "-m", "--flag")


def test_a_module_is_the_main_module(tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").touch()
    (tmp_path / "own" / "script.py").write_text(TELLS)
    (tmp_path / "own" / "__main__.py").write_text(FAILS)
    both(tmp_path, "-m", "own.script", "x")
    both(tmp_path, "-m", "own")
