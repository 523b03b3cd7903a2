"""How many ranks, on which cores; which files belong to a script; what its ranks find set."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from paceline.config.environment import (
    given_shares,
    named_variables,
    script_environment,
    started_by,
)
from paceline.errors import ConfigError, RunDirectoryError
from paceline.launch.scripts import counting, sources
from paceline.launch.scripts.counting import Resources, asked_ranks, auto_ranks, cuda_devices
from paceline.local.cores import physical_cores
from paceline.schema import RankContext
from paceline.schema.script import Script, read_script, script_text


def topology(root: Path, *cores: tuple[int, int, str]) -> Path:
    for core, package, siblings in cores:
        place = root / f"cpu{core}" / "topology"
        place.mkdir(parents=True)
        (place / "physical_package_id").write_text(f"{package}\n")
        (place / "thread_siblings_list").write_text(f"{siblings}\n")
    return root


def test_hardware_threads_count_as_one_core(tmp_path: Path) -> None:
    root = topology(
        tmp_path, (0, 0, "0,4"), (1, 1, "1,5"), (2, 0, "2,6"), (3, 1, "3,7"),
        (4, 0, "0,4"), (5, 1, "1,5"), (6, 0, "2,6"), (7, 1, "3,7"),
    )  # fmt: skip
    # One socket after the other, so that a rank's cores are neighbours.
    assert physical_cores(tuple(range(8)), root) == ((0, 4), (2, 6), (1, 5), (3, 7))
    # One that may use part of the machine only.
    assert physical_cores((1, 4), root) == ((4,), (1,))
    assert physical_cores((0, 1), tmp_path / "nothing") == ((0,), (1,))


def test_ranks_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ((0, 4), (1, 5), (2, 6), (3, 7))
    monkeypatch.setattr(counting, "physical_cores", lambda cores: groups)
    monkeypatch.setattr(counting, "usable_cores", lambda: 4)
    assert [counting.rank_cores(2, rank) for rank in (0, 1)] == [
        ((0, 4, 1, 5), 2),
        ((2, 6, 3, 7), 2),
    ]
    assert counting.rank_cores(3, 0) == ((0, 4), 1)
    assert counting.rank_cores(8, 5) == ((1, 5), 1)
    # A quota leaves all cores visible: ranks have fewer threads there, not fewer cores.
    monkeypatch.setattr(counting, "usable_cores", lambda: 2)
    assert counting.rank_cores(2, 1) == ((2, 6, 3, 7), 1)


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 3), ("", 0), ("0,2", 2), ("1,-1,0", 1), ("0,7", 1), ("GPU-a", 1)]
)
def test_cuda_devices_are_counted_without_torch(
    tmp_path: Path, visible: str | None, count: int
) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / name).mkdir()
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert cuda_devices(tmp_path, given) == count
    assert cuda_devices(tmp_path / "no-driver", given) == 0
    assert auto_ranks(Resources(cores=8, devices=3)) == 3


def test_nproc() -> None:
    assert asked_ranks("auto") is None
    assert asked_ranks("3") == 3
    for text in ("0", "-1", "two", "1.5", "", "5000"):
        with pytest.raises(ConfigError, match="must be `auto` or a number of ranks"):
            asked_ranks(text)


def test_modules_beside_a_script_belong_to_it(tmp_path: Path) -> None:
    files = {
        "train.py": "import os, helper\nfrom package.deep import thing\nimport torch, not_there\n",
        "helper.py": "def late():\n    from package import other\n",
        "package/__init__.py": "",
        "package/deep.py": "from . import near\nfrom .near import x\n",
        "package/near.py": "from ..helper import late\nimport helper\n",
        "package/other.py": "this is no Python",
        "package/unused.py": "",
        "unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = sources.hashes(tmp_path / "train.py", tmp_path)
    used = {name for name in files if "unused" not in name}
    assert {str(Path(path).relative_to(tmp_path)) for path in found} == used
    text = files["helper.py"].encode()
    assert found[str(tmp_path / "helper.py")] == hashlib.sha256(text).hexdigest()
    assert sources.module_file("package.deep", tmp_path) == tmp_path / "package" / "deep.py"
    assert sources.module_file("package", tmp_path) is None
    assert sources.module_file("torch", tmp_path) is None


def environment(context: RankContext, before: dict[str, str], **given: str) -> dict[str, str]:
    return script_environment(
        context,
        name="one",
        threads=4,
        interface="eth0",
        error_file=Path("/runs/one/rank-3/error.json"),
        variables=given,
        environment=before,
    )


CONTEXT = RankContext(
    rank=3, world_size=4, local_rank=1, local_size=2, node=1, nodes=2, address="a", port=29,
    secret="secret00secret00",
)  # fmt: skip


def test_ranks_find_what_torchrun_would_set() -> None:
    """Every variable of torch's elastic agent: the list is read from the installed torch."""
    import inspect
    import re

    from torch.distributed.elastic.agent.server import local_elastic_agent

    found = environment(CONTEXT, {"HOME": "/home/me"})
    text = inspect.getsource(local_elastic_agent.LocalElasticAgent._start_workers)
    names = set(re.findall(r'"([A-Z][A-Z_]+)": ', text)) | {"LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"}
    assert len(names) >= 16
    assert names <= found.keys()
    expected = {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "a", "MASTER_PORT": "29", "TORCHELASTIC_RUN_ID": "one",
        "TORCHELASTIC_USE_AGENT_STORE": "False", "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "eth0", "HOME": "/home/me",
    }  # fmt: skip
    assert expected.items() <= found.items()
    started = started_by(found)
    assert started is not None
    assert (started.by, started.rank, started.has_store) == ("torchrun", 3, False)


def test_what_the_user_has_set_stays() -> None:
    before = {"OMP_NUM_THREADS": "9", "GLOO_SOCKET_IFNAME": "mine", "RANK": "77"}
    found = environment(CONTEXT, before)
    assert (found["OMP_NUM_THREADS"], found["GLOO_SOCKET_IFNAME"]) == ("9", "mine")
    assert found["RANK"] == "3"
    assert environment(CONTEXT, before, OMP_NUM_THREADS="2")["OMP_NUM_THREADS"] == "2"


def test_nothing_of_an_agent_reaches_the_script() -> None:
    """It would take itself for a rank of a training of ours, or run with an agent's threads."""
    before = {
        "PACELINE_RANK": "0", "PACELINE_AGENT": "17", "PACELINE_BOARD": "5",
        "PACELINE_DATA": "/data", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    found = environment(CONTEXT, before)
    assert found["OMP_NUM_THREADS"] == "4"
    assert found["PACELINE_DATA"] == "/data"
    assert not {"PACELINE_RANK", "PACELINE_AGENT", "PACELINE_BOARD", "TORCH_CPP_LOG_LEVEL"} & set(
        found
    )


def test_variables_by_name() -> None:
    here = {"TOKEN": "x", "OMP_NUM_THREADS": "2"}
    assert named_variables(["TOKEN", "A=b=c", "E="], here) == {
        "OMP_NUM_THREADS": "2", "TOKEN": "x", "A": "b=c", "E": "",
    }  # fmt: skip
    for word, reason in (
        ("NOPE", "no such variable here"),
        ("1A=x", "must be NAME"),
        ("=x", "NAME"),
    ):
        with pytest.raises(ConfigError, match=reason):
            named_variables([word], here)
    assert given_shares({"PACELINE_SHARES": "3,1.5"}) == [3.0, 1.5]
    assert given_shares({}) is None
    with pytest.raises(ConfigError, match="numbers with commas"):
        given_shares({"PACELINE_SHARES": "3;1"})


def test_a_script_and_its_run_say_the_same(tmp_path: Path) -> None:
    script = Script(
        target="/x/train.py", arguments=("--lr", "1e-3", "--", "é\n"), folder=os.sep,
        variables={"A": "b"}, interfaces=("eth0", ""), sources={"/x/train.py": "00"},
    )  # fmt: skip
    path = tmp_path / "config.toml"
    path.write_text(script_text("one", script))
    assert read_script(path) == script
    assert script.words == ["/x/train.py", "--lr", "1e-3", "--", "é\n"]
    assert Script(target="a.b", is_module=True).words == ["-m", "a.b"]
    path.write_text('name = "a training"\n')
    with pytest.raises(RunDirectoryError, match="`paceline run` did not write it"):
        read_script(path)
