"""How often a training is started again, with which hosts, over what."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.api import HostsRequest, TrainingStart
from paceline.config import config_from
from paceline.errors import LostError
from paceline.run import RunDirectory
from paceline.schema.hosts import Host, Hosts
from paceline.workflow.restarts import Restarts

HOSTS = Hosts(host=tuple(Host(name=name) for name in "abc"))
ERROR = LostError("host c (rank 2) has gone")


def begun(folder: Path, *, engine: str = "auto", restarts: int = 2) -> TrainingStart:
    said: list[str] = []
    return TrainingStart(
        config=config_from({"train.restarts": restarts}),
        run=RunDirectory(folder),
        hosts=HostsRequest(hosts=HOSTS, engine=engine),
        say=said.append,
    )


def ended(**changes: Any) -> Any:
    """A session that was lost in update 12."""
    usual = {
        "training": True, "signals": SimpleNamespace(numbers=[]), "unheard": {"c"},
        "engine": SimpleNamespace(places_nodes=False, backend="mpi4py"), "is_led": True,
        "places": HOSTS.places, "order": SimpleNamespace(hosts=HOSTS), "reached": lambda node: 12,
    }  # fmt: skip
    return SimpleNamespace(**(usual | changes))


def save(folder: Path, update: int) -> None:
    path = folder / "checkpoints" / f"step-{update:08d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text("{}")


def test_a_silent_host_is_left_out_and_gloo_takes_over(tmp_path: Path) -> None:
    start = begun(tmp_path)
    save(tmp_path, 10)
    again = Restarts(start).after(ended(), ERROR, start)
    assert again.hosts is not None
    assert [host.name for host in again.hosts.hosts.host] == ["a", "b"]
    assert [host.name for host in again.unheard] == ["c"]
    assert again.hosts.engine == "ssh"
    assert again.broken is not None
    assert again.broken.why == str(ERROR)
    assert start.say.__self__[0].endswith(  # type: ignore[attr-defined]
        "starting again from update 10 (2 updates are done again)"
    )


def test_an_engine_that_was_asked_for_stays(tmp_path: Path) -> None:
    start = begun(tmp_path, engine="mpi")
    again = Restarts(start).after(ended(unheard=set()), ERROR, start)
    assert again.hosts is not None
    assert again.hosts.engine == "mpi"
    assert [host.name for host in again.hosts.hosts.host] == ["a", "b", "c"]


def test_starts_without_a_new_checkpoint_are_counted(tmp_path: Path) -> None:
    start = begun(tmp_path)
    restarts = Restarts(start)
    for update in (10, 20, 30):  # each of them got further
        save(tmp_path, update)
        start = restarts.after(ended(), ERROR, start)
    start = restarts.after(ended(), ERROR, start)
    with pytest.raises(LostError, match="started again 2 times without a new checkpoint"):
        restarts.after(ended(), ERROR, start)


@pytest.mark.parametrize(
    "how",
    [
        {"training": False},
        {"signals": SimpleNamespace(numbers=[2])},
        {"engine": SimpleNamespace(places_nodes=True, backend="gloo")},
        {"unheard": {"a", "b", "c"}},
    ],
)
def test_what_is_not_started_again(how: dict[str, Any], tmp_path: Path) -> None:
    start = begun(tmp_path)
    with pytest.raises(LostError) as raised:
        Restarts(start).after(ended(**how), ERROR, start)
    assert raised.value is ERROR
    off = begun(tmp_path, restarts=0)
    with pytest.raises(LostError) as raised:
        Restarts(off).after(ended(), ERROR, off)
    assert raised.value is ERROR
