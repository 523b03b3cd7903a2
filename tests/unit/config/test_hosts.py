"""hosts.toml, `--hosts`, and places found from the environment of other launchers."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config.environment import expand_nodes, slurm_allocation, started_by
from paceline.config.hosts import find_hosts, hosts_from, load_hosts
from paceline.errors import ConfigError
from paceline.plan.together import NodeSite, first_plan, plan_as_asked, trains_in_legs
from paceline.schema import Config, ExchangeSettings, LocalSettings, WorkloadSettings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no [[host]]", 'role = "worker"']),
        ("[[host]]\nname = 'a'\nrole = 'server'", ["only servers", "must train"]),
        ("[[host]]\naddress = 'a'", ["lacks the key 'name'"]),
        ("[[host]]\nname = 'a'\nslots = 0", ["slots = 0 is too small", "at least 1"]),
        ("[[host]]\nname = 'a'\nrole = 'boss'", ["'boss'", "worker, server"]),
        ("[[host]]\nname = 'a'\nslot = 2", ["'host[0].slot'", "did you mean 'host[0].slots'"]),
        ("[[host]]\nname = 'a; rm -rf /'", ["'a; rm -rf /'", "letters, digits"]),
        ("[[host]]\nname = '-oProxyCommand=x'", ["-oProxyCommand", "plain name"]),
        ("[[host]]\nname = 'a'\n[[host]]\nname = 'a'", ["'a' appears twice", "slots = 2"]),
        (
            "[[host]]\nname='a'\nshare=2.0\n[[host]]\nname='b'",
            ["'a' has share = 2", "'b' has none"],
        ),
        ("[[host]]\nname='a'\nshare=0.0", ["every host has share = 0"]),
        ("[defaults]\nname = 'a'", ["'defaults.name'", "Valid:"]),
        ("host = 3", ["host = 3", "must be a list"]),
        ("[[host]\n", ["not valid TOML"]),
    ],
)
def test_mistakes_in_hosts_toml(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_hosts(path)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,,b", ["'a,,b'", "empty name", "hosts.toml"]),
        ("a:x", ["'a:x' is not a host's name"]),
        ("missing.toml", ["no such file"]),
        ("lab", ["inside a lab only"]),
    ],
)
def test_mistakes_on_the_line(text: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_LAB_HOSTS", raising=False)
    with pytest.raises(ConfigError) as caught:
        find_hosts(text)
    for word in words:
        assert word in str(caught.value)


def test_defaults_slots_and_servers() -> None:
    hosts = hosts_from(
        {
            "defaults": {"python": "/opt/python", "slots": 2},
            "host": [
                {"name": "s", "role": "server", "slots": 1},
                {"name": "a", "address": "me@10.0.0.1"},
                {"name": "b", "slots": 1, "python": "/other"},
            ],
        }
    )
    places = [(place.node, place.host.name, place.slot) for place in hosts.places]
    assert places == [(0, "a", 0), (1, "a", 1), (2, "b", 0), (3, "s", 0)]
    assert [host.python for host in hosts.in_order] == ["/opt/python", "/other", "/opt/python"]
    assert hosts.workers[0].reach == "me@10.0.0.1"
    assert hosts.workers[0].network_address == "10.0.0.1"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, ("mpi", 1, 4)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, ("mpi", 2, 4)),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, ("torchrun", 0, 2)),
        (
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"},
            ("slurm", 3, 4),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, None),
        ({"RANK": "0", "WORLD_SIZE": "2", "PACELINE_AGENT": "9"}, None),
    ],
)
def test_who_started_us(variables: dict[str, str], expected: tuple[str, int, int] | None) -> None:
    found = started_by(variables)
    assert (found and (found.by, found.rank, found.size)) == expected


def test_a_damaged_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE = 'many' must be a whole number"):
        started_by({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "many"})


def test_slurm_names() -> None:
    assert expand_nodes("gpu[01-03],login,c[1,5-6]") == [
        "gpu01", "gpu02", "gpu03", "login", "c1", "c5", "c6",
    ]  # fmt: skip
    found = slurm_allocation({"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert found is not None
    assert (found.hosts, found.tasks) == (("n1", "n2"), 2)
    assert slurm_allocation({}) is None


SITES = [NodeSite(host="a", usable=4), NodeSite(host="b", usable=2)]


@pytest.mark.parametrize("kind", ["auto", "ring", "parameter_server", "hogwild", "averaging"])
def test_hosts_of_which_nothing_is_known_begin_with_threads(kind: str) -> None:
    config = Config(exchange=ExchangeSettings(kind=kind))  # type: ignore[arg-type]
    plan = first_plan(config, [*SITES, NodeSite(host="c", usable=1)])
    assert [(node.strategy, node.threads) for node in plan.nodes] == [
        ("threads", 4), ("threads", 2), ("sequential", 1),
    ]  # fmt: skip
    assert [node.share for node in plan.nodes] == [1.0, 0.5, 0.25]
    assert plan.exchange == ("allreduce" if kind == "auto" else kind)
    assert trains_in_legs(config, plan) == (kind in ("auto", "ring"))


def test_what_was_asked_for_by_name_is_no_leg() -> None:
    for config in (
        Config(local=LocalSettings(strategy="threads")),
        Config(exchange=ExchangeSettings(compression="bf16")),
    ):
        assert not trains_in_legs(config, first_plan(config, SITES))
    assert not trains_in_legs(Config(), first_plan(Config(), SITES[:1]))


def test_asked_strategy_uses_each_hosts_cores_and_shares_by_hand() -> None:
    config = Config(
        local=LocalSettings(strategy="threads"), workload=WorkloadSettings(batch_per_worker=8)
    )
    sites = [NodeSite(host="a", usable=4, share=2.0), NodeSite(host="b", usable=2, share=1.0)]
    plan = plan_as_asked(config, [*sites, NodeSite(host="s", usable=2, serves=True)])
    assert [node.threads for node in plan.nodes[:2]] == [4, 2]
    assert [node.share for node in plan.nodes] == [1.0, 0.5, 0.0]
    assert plan.batch_size == 16
