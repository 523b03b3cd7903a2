"""What every test stands on: places of its own, no leaks, and the real command line.

Tests never see the user's home or cache: HOME, XDG_CACHE_HOME, PACELINE_CACHE and
TMPDIR lead into a folder that is removed at the end. PACELINE_DATA is passed on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from leaks import BACKING, SESSION, Watch, adopt_orphans, own_shared_memory

from paceline.hardware.instructions import use_safe_instructions
from paceline.schema import Config

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]
StartCli = Callable[..., "subprocess.Popen[str]"]

AMX = "amx.json"
_home: Path | None = None

# On a busy machine examples take their time: that is no fault of what they are examples of.
settings.register_profile("paceline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")


def pytest_configure(config: pytest.Config) -> None:
    """Lead everything that is kept for the user into a folder of this session."""
    global _home
    # Folders of failed tests stay where pytest always puts them.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # A short name: paths of sockets may not be longer than about a hundred characters.
    _home = Path(tempfile.mkdtemp(prefix="pl-"))
    for name, folder in (
        ("HOME", "home"),
        ("XDG_CACHE_HOME", "cache"),
        ("PACELINE_CACHE", "paceline"),
        ("TMPDIR", "tmp"),
    ):
        (_home / folder).mkdir()
        os.environ[name] = str(_home / folder)
    tempfile.tempdir = None
    own_shared_memory()
    # MPI's shared memory beside that of others who test at the same time, not among it.
    shared = Path(tempfile.mkdtemp(prefix=SESSION, dir="/dev/shm"))
    os.environ[BACKING] = str(shared)
    adopt_orphans()
    # Tests that a shell has put into the background would hand on that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # So would tests under nohup that a closing terminal is.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Before the first computation: bf16 must not kill the tests on a machine whose AMX is broken.
    if found := getattr(config, "workerinput", {}).get(AMX):
        (_home / "paceline" / AMX).write_text(found)
    use_safe_instructions(Config(), all_numerics=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers of xdist are told what was found out about AMX: trying it imports torch."""
    assert _home is not None
    stored = _home / "paceline" / AMX
    node.workerinput[AMX] = stored.read_text() if stored.exists() else ""


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's folder."""
    if _home is not None:
        shutil.rmtree(_home, ignore_errors=True)
        shutil.rmtree(os.environ[BACKING], ignore_errors=True)


LONGEST = ("world", "parity", "docs", "faults", "browser")
"""Folders whose files take longest: begun first, none of them is left over for the end."""
APART = 3
"""Of so many files that begin one after the other, one needs a lab: they take turns."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files so that workers, each of which takes the next one, end at about the same time."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)

    def place(file: Path) -> int:
        folder = file.relative_to(Path(__file__).parent).parts[0]
        return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)

    labs = [f for f in files if any(i.get_closest_marker("lab") for i in files[f])]
    order = sorted((file for file in files if file not in labs), key=place)
    for number, file in enumerate(labs):
        order.insert(number * APART, file)
    items[:] = [item for file in order for item in files[file]]


@pytest.fixture(autouse=True)
def one_lab_at_a_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """A lab's leftovers are looked for on the whole machine: tests side by side take turns."""
    if request.node.get_closest_marker("lab") is None:
        yield
        return
    with Path(os.environ["PYTEST_DEBUG_TEMPROOT"], "pl-lab.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail the test that leaves something behind; torch's settings are put back."""
    watch = Watch()
    torch_before = _torch_settings()
    yield
    _restore_torch(torch_before)
    found = watch.leaks()
    if found:
        pytest.fail("the test left behind: " + "; ".join(found), pytrace=False)


def _torch_settings() -> tuple[int, bool, bool] | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return None
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _restore_torch(before: tuple[int, bool, bool] | None) -> None:
    if before is None or _torch_settings() == before:
        return
    torch: Any = sys.modules["torch"]
    threads, deterministic, warn_only = before
    torch.set_num_threads(threads)
    torch.get_num_threads()  # makes the number stick in this thread
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@pytest.fixture
def run_cli(tmp_path: Path) -> RunCli:
    """Runs the real `paceline ARGUMENTS` to its end: `run_cli("models", cwd=..., env={...})`."""

    def run(
        *arguments: str | Path,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 600.0,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            _command(arguments),
            cwd=cwd or tmp_path,
            env=os.environ | (env or {}),
            timeout=timeout,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.fixture
def call_cli(capfd: pytest.CaptureFixture[str]) -> RunCli:
    """Like `run_cli`, but in this process: for what does not need the start of another one."""

    def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        from paceline import cli

        words = [str(argument) for argument in arguments]
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        output, error = capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return subprocess.CompletedProcess(words, caught.value.code, output, error)

    return call


@pytest.fixture
def start_cli(tmp_path: Path) -> Iterator[StartCli]:
    """Starts the real `paceline ARGUMENTS` in a process group of its own, ended with the test."""
    with contextlib.ExitStack() as stack:

        def start(
            *arguments: str | Path,
            cwd: Path | None = None,
            env: dict[str, str] | None = None,
            **options: Any,
        ) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                _command(arguments),
                cwd=cwd or tmp_path,
                env=os.environ | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                **options,
            )
            stack.callback(_end, process)
            return process

        yield start


def _command(arguments: tuple[str | Path, ...]) -> list[str]:
    return [sys.executable, "-m", "paceline.cli", *(str(argument) for argument in arguments)]


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=600)
