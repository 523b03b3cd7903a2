"""The leak check itself: everything it watches for is found, named, and put right."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import leaks
import pytest
from leaks import BACKING, MPI_SEGMENT, Watch


def test_nothing_left_is_nothing_said() -> None:
    watch = Watch()
    done = subprocess.run([sys.executable, "-I", "-S", "-c", "pass"])
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert done.returncode == 0
    assert watch.leaks() == []


def test_a_running_process_is_named_and_ended() -> None:
    watch = Watch()
    process = subprocess.Popen(["sleep", "600"])
    (found,) = watch.leaks(grace=0.0)
    assert found == f"process {process.pid} is still running: sleep 600"
    process.wait(300)
    assert watch.leaks() == []


def test_an_orphan_of_a_killed_parent_is_found() -> None:
    watch = Watch()
    script = "import subprocess, os; subprocess.Popen(['sleep', '601']); os._exit(0)"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True)
    (found,) = watch.leaks(grace=0.2)
    assert found.endswith("sleep 601")


@pytest.mark.parametrize(
    ("name", "daemon", "is_leak"),
    [("plain", False, True), ("paceline-feed", True, True), ("other", True, False)],
)
def test_threads(name: str, daemon: bool, is_leak: bool) -> None:
    watch = Watch()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name=name, daemon=daemon)
    thread.start()
    found = watch.leaks(grace=0.0)
    done.set()
    thread.join()
    assert found == ([f"thread {name} is still running"] if is_leak else [])


def test_variables_are_named_and_put_back() -> None:
    os.environ["PACELINE_TEST_KEPT"] = "before"
    watch = Watch()
    os.environ["PACELINE_TEST_KEPT"] = "after"
    os.environ["PACELINE_TEST_NEW"] = "1"
    found = watch.leaks()
    assert os.environ.pop("PACELINE_TEST_KEPT") == "before"
    assert "PACELINE_TEST_NEW" not in os.environ
    assert len(found) == 2
    assert "PACELINE_TEST_KEPT changed from 'before' to 'after'" in found[0]


def test_working_directory_is_put_back(tmp_path: Path) -> None:
    watch, before = Watch(), Path.cwd()
    os.chdir(tmp_path)
    (found,) = watch.leaks()
    assert str(tmp_path) in found
    assert Path.cwd() == before


def test_listening_socket_is_named() -> None:
    watch = Watch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert watch.leaks() == [f"socket is still listening on port {port}"]
    assert watch.leaks() == []


def test_files_in_shared_memory_and_temporary_folder() -> None:
    watch = Watch()
    shared = Path("/dev/shm") / f"paceline-test-{os.getpid()}"
    temporary = Path(tempfile.gettempdir()) / "paceline-left"
    other = Path(tempfile.gettempdir()) / "of-another-program"
    for path in (shared, temporary, other):
        path.write_text("left")
    found = watch.leaks(grace=0.0)
    for path in (shared, temporary, other):
        path.unlink()
    assert found == [f"{shared} was left behind", f"{temporary} was left behind"]


def test_mpi_files_are_ours_in_our_folder_only() -> None:
    watch = Watch()
    name = f"{MPI_SEGMENT}test.{os.getpid()}"
    ours, others = Path(os.environ[BACKING]) / name, Path("/dev/shm") / name
    for path in (ours, others):
        path.write_bytes(b"x")
    found = watch.leaks(grace=0.0)
    for path in (ours, others):
        path.unlink()
    assert found == [f"{ours} was left behind"]


def test_what_ends_a_moment_later_is_no_leak() -> None:
    watch = Watch()
    process = subprocess.Popen(["sleep", "0.3"])
    thread = threading.Thread(target=time.sleep, args=(0.3,))
    thread.start()
    assert watch.leaks() == []
    process.wait()


def test_tests_see_nothing_of_the_user() -> None:
    home = Path(os.environ["HOME"])
    assert home == Path.home()
    assert Path(os.environ["PACELINE_CACHE"]).parent == home.parent
    assert Path(tempfile.gettempdir()).parent == home.parent


def test_what_others_have_in_shared_memory_is_not_seen() -> None:
    mine = Path("/dev/shm/a-test-was-here")
    mine.touch()
    script = "import os, leaks; print(leaks.own_shared_memory(), os.listdir('/dev/shm'))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=Path(leaks.__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        assert mine.exists()
    finally:
        mine.unlink()
    if done.stdout.startswith("False"):
        pytest.skip("only root may mount a /dev/shm of its own")
    assert done.stdout == "True []\n"
