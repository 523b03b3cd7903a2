"""`paceline run`: real ranks of real scripts, on this machine and through agents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import plain_ddp  # noqa: E402

from paceline.config.hosts import hosts_from_names  # noqa: E402
from paceline.errors import UserError  # noqa: E402
from paceline.launch.inspection import Inspection  # noqa: E402
from paceline.launch.scripts import on_hosts  # noqa: E402
from paceline.schema.script import Script  # noqa: E402

ODD = HERE / "odd_ranks.py"
TWO_HOSTS = ("--nproc", "1", "--hosts", "localhost,127.0.0.1")
Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]
WHERE = pytest.mark.parametrize(
    "hosts",
    [
        pytest.param(("--nproc", "2"), id="here"),
        pytest.param(TWO_HOSTS, id="hosts", marks=pytest.mark.slow),
    ],
)
pytestmark = [pytest.mark.timeout(900), pytest.mark.world_size(2)]


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (folder / "runs" / "scripts" / "latest" / "run.json").read_text()
    )
    return found


def wait(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# --- scripts that are unchanged -------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--nproc", "2"), id="two ranks"),
        pytest.param(("--nproc", "4"), id="four ranks", marks=pytest.mark.slow),
        pytest.param(("--hosts", "localhost:2,127.0.0.1:2"), id="hosts", marks=pytest.mark.slow),
    ],
)
def test_a_plain_script_trains_as_one_process(
    run_cli: Cli, tmp_path: Path, words: tuple[str, ...]
) -> None:
    model, _, _ = plain_ddp.problem(3)
    plain_ddp.train(model, 3)
    done = run_cli("run", *words, HERE / "plain_ddp.py", "many.pt", "--steps", "3")
    assert done.returncode == 0, done.stderr
    many = torch.load(tmp_path / "many.pt")
    for name, weights in model.state_dict().items():
        assert torch.allclose(weights, many[name], rtol=0, atol=1e-6), name
    ranks = 2 if words == ("--nproc", "2") else 4
    names = [f"rank {rank}]" for rank in range(ranks)]
    assert all(f"{name} 1 threads on " in done.stdout for name in names), done.stdout
    found = summary(tmp_path)
    assert found["finished"]
    assert [end["code"] for end in found["ranks"]] == [0] * ranks


def told(output: str) -> list[dict[str, Any]]:
    lines = [json.loads(line.partition("] ")[2]) for line in output.splitlines()]
    return sorted(lines, key=lambda line: int(line["rank"]))


def test_everything_after_the_script_is_its_own(run_cli: Cli, tmp_path: Path) -> None:
    own = ["--hosts", "x", "--nproc", "7", "-m", "--help", "-h", "--", "--debug", "--set", "é"]
    done = run_cli("run", "--nproc", "2", ODD, "tell", *own, env={"OMP_NUM_THREADS": ""})
    assert done.returncode == 0, done.stderr
    ranks = told(done.stdout)
    assert [rank["argv"] for rank in ranks] == [["tell", *own]] * 2
    assert [rank["place"] for rank in ranks] == [str(tmp_path)] * 2
    cores = [set(rank["cores"]) for rank in ranks]
    assert not cores[0] & cores[1] or len(os.sched_getaffinity(0)) == 1
    assert "2 ranks ended well" in done.stderr
    kept = (tmp_path / "runs" / "scripts" / "latest" / "rank-1" / "output.log").read_text()
    assert json.loads(kept)["argv"] == ["tell", *own]


def test_a_module_on_two_hosts(run_cli: Cli, tmp_path: Path) -> None:
    """Through agents: places, variables that travel, and the same files everywhere."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "odd.py").write_text(ODD.read_text())
    words = ("run", *TWO_HOSTS, "--env", "FLAVOUR=sweet", "-m", "mine.odd", "tell", "-m")
    done = run_cli(*words, env={"OMP_NUM_THREADS": "3"})
    assert done.returncode == 0, done.stderr
    assert "[localhost rank 0] {" in done.stdout
    assert "[127.0.0.1 rank 1] {" in done.stdout
    for number, rank in enumerate(told(done.stdout)):
        assert rank["argv"] == ["tell", "-m"]
        variables = rank["variables"]
        assert (variables["RANK"], variables["GROUP_RANK"]) == (str(number), str(number))
        assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == ("0", "1")
        assert (variables["MASTER_ADDR"], variables["FLAVOUR"]) == ("localhost", "sweet")
        assert variables["OMP_NUM_THREADS"] == "3"
        assert "PACELINE_RANK" not in variables
    run = tmp_path / "runs" / "scripts" / "latest"
    assert "mine/odd.py" in (run / "config.toml").read_text()
    assert not (run / ".launch").exists()


# --- what goes wrong ------------------------------------------------------------


@WHERE
@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("raise", 1, "ValueError: the sample of doom"),
        ("avalanche", 5, "ValueError: the cause"),
        ("kill", 137, "it was killed by SIGKILL (often: out of memory)"),
        ("import", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_the_first_failure_comes_first(
    run_cli: Cli, tmp_path: Path, hosts: tuple[str, ...], mode: str, code: int, words: str
) -> None:
    done = run_cli("run", *hosts, ODD, mode)
    assert done.returncode == code, done.stderr
    said = done.stderr[done.stderr.index(" failed first: ") :]
    assert words in said
    assert "Connection closed by peer" not in done.stderr
    found = summary(tmp_path)
    assert not found["finished"]
    if mode != "import":  # there both fail at the same time
        assert "rank 1 failed first: " in done.stderr
        assert found["first_failure"]["rank"] == 1
    log = f"rank-{found['first_failure']['rank']}/output.log"
    if mode != "kill":
        assert words in (tmp_path / "runs" / "scripts" / "latest" / log).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "code"), [("tell", 0), ("raise", 1)])
def test_logs_come_from_hosts_that_share_no_files(tmp_path: Path, mode: str, code: int) -> None:
    cache = tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, HERE / "private.py", "run", *TWO_HOSTS, "--run", "logs", ODD, mode],
        cwd=tmp_path,
        env=os.environ | {"PACELINE_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stderr
    ends = json.loads((tmp_path / "logs" / "run.json").read_text())["ranks"]
    assert [(end["rank"], end["host"]) for end in ends] == [(0, "localhost"), (1, "127.0.0.1")]
    log = (tmp_path / "logs" / "rank-1" / "output.log").read_text()
    assert "the sample of doom" in log if mode == "raise" else json.loads(log)["rank"] == 1
    assert list((cache / "runs").iterdir()) == []


def test_hosts_must_have_the_same_script(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(
        target="/x/train.py", sources={"/x/train.py": "a" * 64, "/x/helper.py": "b" * 64}
    )

    def facts(train: str, helper: str) -> dict[str, Any]:
        return {
            "versions": {}, "data": "", "sources": {"/x/train.py": train, "/x/helper.py": helper},
        }  # fmt: skip

    def check(**found: dict[str, Any]) -> None:
        monkeypatch.setattr(on_hosts, "inspect_hosts", lambda *_: Inspection(facts=found))
        on_hosts.check_hosts(hosts_from_names(",".join(found)), script, {})

    same = facts("a" * 16, "b" * 16)
    check(a=same, b=same)
    for found, reason in (
        ({"a": same, "b": facts("a" * 16, "c" * 16)}, "host b has another /x/helper.py than a"),
        ({"a": same, "b": facts("none", "b" * 16)}, "host b does not have /x/train.py: copy it"),
        # All hosts agree, and the launcher, which is none of them, has another.
        ({"a": facts("d" * 16, "b" * 16)}, "host a has another /x/train.py than this machine"),
    ):
        with pytest.raises(UserError, match=reason):
            check(**found)


def test_a_rank_that_hangs_is_named(start_cli: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    process = start_cli("run", "--nproc", "2", "--stall", "2", ODD, "stall")
    assert process.stderr is not None
    for line in process.stderr:
        assert "[rank 0] paceline: no output" not in line
        if "[rank 1] paceline: no output and no CPU use for " in line:
            break
    else:
        pytest.fail(f"it ended: {process.communicate()}")
    (tmp_path / "go").touch()
    (tmp_path / "fifo").write_text("")
    process.communicate(timeout=600)
    assert process.returncode == 0
    log = (tmp_path / "runs" / "scripts" / "latest" / "rank-1" / "output.log").read_text()
    assert "no CPU use" in log


@WHERE
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(
    start_cli: Start, tmp_path: Path, hosts: tuple[str, ...], number: int
) -> None:
    """Ctrl-C lets ranks save; a killed launcher cannot: what ranks have started ends in both."""
    process = start_cli("run", *hosts, ODD, "stay")
    files = [tmp_path / f"child-{rank}" for rank in (0, 1)]
    wait(lambda: all(file.exists() for file in files), process)
    children = [int(file.read_text()) for file in files]
    assert all(is_alive(child) for child in children)
    process.send_signal(number)
    output, errors = process.communicate(timeout=600)
    wait(lambda: not any(is_alive(child) for child in children))
    if number == signal.SIGINT:
        assert process.returncode == 130, errors
        assert all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1))
        assert "Traceback" not in output + errors
        found = summary(tmp_path)
        assert (found["finished"], found["signal"]) == (False, signal.SIGINT)


def test_mistakes_are_sentences_and_leave_no_run(call_cli: Cli, tmp_path: Path) -> None:
    for words, reason in (
        (("no_such.py",), "'no_such.py' is no file: name the script"),
        ((str(tmp_path),), "is a folder: name the script"),
        (("--nproc", "many", ODD), "--nproc 'many' must be `auto` or a number"),
        (("--env", "NO_SUCH_VARIABLE", ODD), "there is no such variable here"),
        (("--hosts", "no-such-host.invalid", ODD), "host no-such-host.invalid does not answer"),
        (("--run", str(HERE), ODD), "exists and is not empty"),
    ):
        done = call_cli("run", *words)
        assert done.returncode == 2
        assert reason in done.stderr
    assert not list(Path.cwd().glob("runs/scripts"))
