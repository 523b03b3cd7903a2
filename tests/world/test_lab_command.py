"""`paceline lab`: what a person types, and that nothing is left however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab import Lab
from paceline.lab.testing import leftovers_of, make_lab, skip_without_namespaces

__all__ = ["make_lab"]
pytestmark = pytest.mark.lab
TWO_HOSTS = str(Path(__file__).parents[2] / "examples" / "lab" / "two-hosts.toml")
PACELINE = [
    sys.executable,
    "-c",
    "from paceline import cli; cli.COMMANDS.setdefault('lab', ('paceline.commands.lab', ''));"
    " cli.main()",
    "lab",
]


def lab_command(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [*PACELINE, *arguments], capture_output=True, text=True, timeout=600, **options
    )


def wait_until(condition: Callable[[], bool], seconds: float = 300.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def start_sleepers(tmp_path: Path, *options: str) -> subprocess.Popen[bytes]:
    """A lab whose hosts run processes that no one would stop: daemons and their kin."""
    ready = tmp_path / "ready"
    script = f"ssh b 'setsid sleep 600 & touch {ready}; sleep 601' & sleep 602"
    process = subprocess.Popen([*PACELINE, "run", *options, TWO_HOSTS, "--", "sh", "-c", script])
    assert wait_until(ready.exists)
    return process


def test_exit_code_output_and_counters() -> None:
    skip_without_namespaces()
    script = "hostname; ssh b hostname; exit 3"
    done = lab_command(
        "run", "--json", TWO_HOSTS, "--set", "link.rate=50mbit", "--", "sh", "-c", script
    )
    assert done.returncode == 3
    names, record = done.stdout.splitlines()[:2], json.loads(done.stdout.splitlines()[-1])
    assert names == ["a", "b"]
    assert record["exit_code"] == 3
    assert record["emulated"] is True
    assert record["hosts"]["a"]["link"] == "50mbit"
    assert record["hosts"]["a"]["bytes_sent"] >= 0
    assert "sent MB" in done.stderr


def test_the_command_runs_where_it_is_told() -> None:
    skip_without_namespaces()
    assert lab_command("run", "--on", "b", TWO_HOSTS, "--", "hostname").stdout == "b\n"


def test_faults_of_the_file_happen_at_their_times(tmp_path: Path) -> None:
    skip_without_namespaces()
    file = tmp_path / "lab.toml"
    faults = [("300ms", "pause"), ("600ms", "resume"), ("900ms", "shutdown"), ("1s", "cut")]
    file.write_text(
        Path(TWO_HOSTS).read_text()
        + "".join(f'[[fault]]\nat = "{at}"\nkind = "{kind}"\nhost = "b"\n' for at, kind in faults)
    )
    done = lab_command(
        "run", "--json", str(file), "--", "sh", "-c", "ssh b sleep 60; echo $?; sleep 0.5"
    )
    record = json.loads(done.stdout.splitlines()[-1])
    assert [fault["kind"] for fault in record["faults"]] == ["pause", "resume", "shutdown", "cut"]
    for fault, (at, _) in zip(record["faults"], faults, strict=True):
        assert fault["seconds"] >= {"ms": 1e-3}.get(at[-2:], 0) * float(at.rstrip("ms"))
    assert "it was shut down" in record["faults"][3]["error"]
    assert done.stdout.splitlines()[0] == "255"


@pytest.mark.parametrize("options", [(), ("--plain",)], ids=["emulated", "plain"])
def test_kill_9_leaves_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    if not options:
        skip_without_namespaces()
    process = start_sleepers(tmp_path, *options)
    assert len(leftovers_of(process.pid)) > 5
    process.kill()
    process.wait()
    assert wait_until(lambda: not leftovers_of(process.pid)), leftovers_of(process.pid)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_end_the_command_and_leave_nothing(tmp_path: Path, number: int, code: int) -> None:
    skip_without_namespaces()
    process = start_sleepers(tmp_path)
    process.send_signal(number)
    assert process.wait(300) == code
    assert leftovers_of(process.pid) == []


def test_clean_removes_what_no_one_else_could(tmp_path: Path) -> None:
    skip_without_namespaces()
    process = start_sleepers(tmp_path)
    supervisor = next(
        int(thing.split()[1])
        for thing in leftovers_of(process.pid)
        if thing.startswith("process")
        and "supervisor.py" in Path(f"/proc/{thing.split()[1]}/cmdline").read_text()
    )
    lab_command("clean")
    assert process.poll() is None, "a living lab must not be cleaned away"
    process.send_signal(signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    process.kill()
    process.wait()
    # Its agents died with the supervisor; files and control groups are still there.
    assert wait_until(
        lambda: not any(thing.startswith("process") for thing in leftovers_of(process.pid))
    )
    assert leftovers_of(process.pid)
    done = lab_command("clean")
    assert f"paceline-lab-{process.pid}-" in done.stdout
    assert leftovers_of(process.pid) == []


def test_without_privileges_hosts_are_plain_processes() -> None:
    if os.geteuid() == 0:
        drop = shutil.which("setpriv")
        if drop is None:
            pytest.skip("setpriv is needed to give up root's powers")
        without = [drop, "--bounding-set=-all", "--inh-caps=-all"]
    else:
        without = []
    script = 'ssh b "echo \\$PACELINE_LAB_HOST"; cat "$PACELINE_LAB_HOSTS"'
    done = subprocess.run(
        [*without, *PACELINE, "run", "--json", TWO_HOSTS, "--", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("b\n")
    assert 'address = "127.77.0.2"' in done.stdout
    assert "hosts are plain processes on loopback addresses because" in done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["emulated"] is False
    assert "link rates" in record["not_emulated"]


def test_plain_hosts_can_be_killed_and_paused_but_not_cut(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("a", "b", plain=True)
    assert lab.addresses == {"a": "127.77.0.1", "b": "127.77.0.2"}
    process = lab.start(["sleep", "60"], on="b")
    other = lab.start(["sleep", "60"], on="a")
    assert lab.pause("b") == 1
    stat = Path(f"/proc/{process.pid}/stat")
    assert wait_until(lambda: stat.read_text().split()[2] == "T")
    lab.kill("b")
    assert process.wait(300) == -9
    assert wait_until(lambda: not Path(f"/proc/{process.pid}").exists())
    assert other.poll() is None
    with pytest.raises(Exception, match="cannot cut a link of host 'a'"):
        lab.cut("a")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nowhere.toml", "--", "true"], "cannot read the lab file"),
        (["run", TWO_HOSTS, "--set", "host.c.cores=1", "--", "true"], "unknown host 'c'"),
        (["run", TWO_HOSTS, "--on", "z", "--", "true"], "unknown host 'z'"),
        (["run", "--plain", TWO_HOSTS, "--", "no-such-program"], "cannot start 'no-such-program'"),
        (["run", "--plain", TWO_HOSTS], "there is no command to run"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(arguments: list[str], words: str) -> None:
    done = lab_command(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_check_says_what_can_be_emulated() -> None:
    done = lab_command("check", "--json")
    findings = json.loads(done.stdout)
    assert done.returncode == (0 if findings["hosts as namespaces, shaped links"] == "yes" else 1)
