"""hosts.toml, `--hosts`, and places found from the environment of other launchers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.config.environment import expand_nodes, slurm_allocation, started_by
from paceline.config.hosts import find_hosts, hosts_from, load_hosts
from paceline.errors import ConfigError, UnsupportedError
from paceline.plan.together import NodeSite, plan_as_asked, plan_from_races, race_batches
from paceline.schema import (
    Candidate,
    Config,
    ExchangeSettings,
    LocalSettings,
    NodePlan,
    Race,
    Workload,
)


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


def entry(strategy: str, speed: float, layout: str = "contiguous", **more: object) -> Candidate:
    node = NodePlan(strategy=strategy)
    name = f"{strategy} {layout} {more.get('precision', '')}"
    return Candidate(
        name=name,
        node=node,
        memory_format=layout,
        images_per_second=speed,
        **more,  # type: ignore[arg-type]
    )


SITES = [NodeSite(host="a", usable=4), NodeSite(host="b", usable=2)]


def test_one_layout_for_all_best_in_sum_and_shares_by_speed() -> None:
    races = {
        0: Race(candidates=(entry("threads", 300.0), entry("threads", 310.0, "channels_last"))),
        1: Race(candidates=(entry("processes", 200.0), entry("threads", 155.0, "channels_last"))),
    }
    plan = plan_from_races(Config(), SITES, races)
    assert plan.memory_format == "contiguous"
    assert [node.strategy for node in plan.nodes] == ["threads", "processes"]
    assert [node.share for node in plan.nodes] == [1.0, pytest.approx(2 / 3)]
    assert plan.predicted["images_per_second"] == 500.0
    assert {rejected.option.partition(":")[0] for rejected in plan.rejected} == {"a", "b"}


@pytest.mark.parametrize("kind", ["parameter_server", "hogwild"])
def test_a_faster_strategy_that_does_not_go_with_the_exchange_is_left_out(kind: str) -> None:
    config = Config(exchange=ExchangeSettings(kind=kind))  # type: ignore[arg-type]
    fast = dataclasses.replace(entry("processes", 400.0), chosen=True)
    races = {n: Race(candidates=(fast, entry("threads", 300.0))) for n in (0, 1)}
    plan = plan_from_races(config, SITES, races)
    assert [node.strategy for node in plan.nodes] == ["threads", "threads"]
    only = {n: Race(candidates=(fast,)) for n in (0, 1)}
    with pytest.raises(UnsupportedError, match=r"processes was raced, but .* one rank per node"):
        plan_from_races(config, SITES, only)


def test_numerics_that_change_results_are_taken_only_when_allowed() -> None:
    fast = entry("threads", 900.0, precision="bf16", exact=False)
    races = {n: Race(candidates=(entry("threads", 300.0), fast)) for n in (0, 1)}
    assert plan_from_races(Config(), SITES, races).precision == "fp32"


def test_asked_strategy_uses_each_hosts_cores_and_shares_by_hand() -> None:
    config = Config(local=LocalSettings(strategy="threads"), workload=Workload(batch_per_worker=8))
    sites = [NodeSite(host="a", usable=4, share=2.0), NodeSite(host="b", usable=2, share=1.0)]
    plan = plan_as_asked(config, [*sites, NodeSite(host="s", usable=2, serves=True)])
    assert [node.threads for node in plan.nodes[:2]] == [4, 2]
    assert [node.share for node in plan.nodes] == [1.0, 0.5, 0.0]
    assert plan.batch_size == 16
    assert race_batches(config, sites) == {0: 8, 1: 8}
    assert race_batches(Config(workload=Workload(batch_size=90)), sites) == {0: 60, 1: 30}
