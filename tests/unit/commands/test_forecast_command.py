"""`paceline forecast`: what people type, and the command on a machines.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from cost_cases import host, machines

from paceline.commands.forecast import (
    command,
    currency_from,
    link_from,
    node_counts,
    price_from,
    speeds,
)
from paceline.errors import ConfigError
from paceline.schema import write_json


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", (1,)),
        ("4,2", (2, 4)),
        ("1,2,4,...,64", (1, 2, 4, 8, 16, 32, 64)),
        ("1,2,...,100", (1, 2, 4, 8, 16, 32, 64, 100)),
        ("10,20,30,...,60", (10, 20, 30, 40, 50, 60)),
        ("1,2,4,...,4096", tuple(2**k for k in range(13))),
    ],
)
def test_numbers_of_nodes(text: str, expected: tuple[int, ...]) -> None:
    assert node_counts(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "1,...", "1,...,8", "2,x", "1,2,...,y", "1.5"])
def test_numbers_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"such as 1,2,4,\.\.\.,64"):
        node_counts(text)


def test_links_speeds_and_prices() -> None:
    link = link_from("100Mbit/s, 2ms")
    assert link.latency.median == pytest.approx(0.002)
    assert 9e6 < link.forward.median < 12.5e6
    assert speeds("1, 1/21") == (1.0, pytest.approx(1 / 21))
    assert price_from("0.4/h") == (0.4, None)
    assert price_from("900") == (None, 900.0)
    assert currency_from(" EUR ") == "EUR"
    for ask, text in (
        (link_from, "1Gbit/s"),
        (link_from, "fast,0.2ms"),
        (speeds, "1,0"),
        (speeds, "1/0"),
        (price_from, "cheap"),
        (price_from, "-1"),
        (price_from, "nan/h"),
        (currency_from, "\x1b[31m"),
    ):
        with pytest.raises(ConfigError, match="must be"):
            ask(text)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "machines.json"
    hosts = (host("a", spread=0.06, parameters=0.01), host("slow", slower=20, parameters=0.01))
    write_json(path, machines(*hosts))
    return path


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_table_and_a_verdict(stored: Path) -> None:
    text = run(
        "--machines", stored, "--nodes", "1,2,4", "--link", "1Gbit/s,0.2ms", "--price", "1/h"
    )
    assert text.startswith("worth it: one more machine like this one means ")
    assert "a training on 2 machines costs " in text.split("exchange (~: not exact)")[0]
    assert "\nworth it: 2 nodes with " in text
    assert "break-even: 2 nodes" in text
    assert "cost/epoch" in text
    assert "reduce_broadcast" in text


def test_machines_that_are_bought(stored: Path) -> None:
    text = run(
        "--machines", stored, "--link", "1Gbit/s,0.2ms", "--price", "900", "--currency", "EUR"
    )
    assert "2 machines cost 900 EUR more and save " in text
    assert "cost/epoch" not in text


def test_a_busy_machine_gives_no_verdict(tmp_path: Path) -> None:
    busy = dataclasses.replace(host("a", parameters=0.01), busy=0.4)
    write_json(tmp_path / "busy.json", machines(busy))
    text = run("--machines", tmp_path / "busy.json", "--nodes", "1,2", "--link", "1Gbit/s,0.2ms")
    assert text.startswith("not known: this machine was busy (40% of its cores")
    assert "worth it" not in text


def test_json_for_plots(stored: Path) -> None:
    found = json.loads(run("--machines", stored, "--like", "slow", "--nodes", "1,2", "--json"))
    assert found["host"] == "slow"
    assert found["rows"][0]["images_per_second"] == pytest.approx(64)
    assert {"verdict", "break_even", "worth_it", "notes"} < set(found)
    # the link of machines.json, which was measured: nothing is said of a described one
    assert not any("described" in note for note in found["notes"])


def test_settings_change_the_question(stored: Path) -> None:
    found = json.loads(
        run(
            "--machines", stored, "--nodes", "1,2", "--json",
            "--set", "workload.batch_size=512", "--set", "train.steps=7",
        )
    )  # fmt: skip
    row = found["rows"][0]
    assert row["batch"] == 512
    assert row["end_seconds"] == pytest.approx(7 * row["step_seconds"])


def test_what_is_missing_is_said(stored: Path, tmp_path: Path) -> None:
    for arguments, rule in (
        (["--nodes", "2"], "--link is missing"),
        (["--link", "1Gbit/s,1ms", "--like", "a"], "--like needs --machines"),
        (["--machines", stored, "--like", "b"], "has: a, slow"),
        (["--machines", stored, "--set", "workload.model=vgg16"], "were measured for test"),
    ):
        with pytest.raises(ConfigError, match=rule):
            run(*arguments)
    bare = dataclasses.replace(machines(host("a")), links=())
    write_json(tmp_path / "bare.json", bare)
    with pytest.raises(ConfigError, match="has no links"):
        run("--machines", tmp_path / "bare.json")
