"""`paceline versions`: what is served is changed by hand, and refused where it makes no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.commands.versions import command
from paceline.errors import ConfigError
from paceline.schema.codec import write_json
from paceline.schema.signature import Signature
from paceline.schema.version import Compared, Origin, Version
from paceline.serve.versions import read_serving, served_numbers


def call(*words: str) -> str:
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "models" / "digits"
    for number in (1, 2, 10):
        (place / str(number)).mkdir(parents=True)
    return place


def _fresh(folder: Path) -> Path:
    place = folder.parent / "fresh"
    for number in (1, 10):
        (place / str(number)).mkdir(parents=True)
    return place


def test_rollback_promote_and_labels(folder: Path) -> None:
    where = str(folder)
    assert served_numbers(read_serving(folder), [1, 2, 10]) == [10]
    call("rollback", where)
    assert read_serving(folder).labels == {"stable": 2}
    call("rollback", where)
    assert read_serving(folder).labels == {"stable": 1}
    with pytest.raises(ConfigError, match="no version before 1"):
        call("rollback", where)
    with pytest.raises(ConfigError, match="would answer all requests, not 5%"):
        call("label", str(_fresh(folder)), "canary", "10", "--percent", "5")
    call("label", where, "canary", "10", "--percent", "5")
    assert read_serving(folder).canary_percent == 5
    call("promote", where, "10")
    assert read_serving(folder).labels == {"stable": 10}
    call("promote", where, "latest")
    assert read_serving(folder).labels == {}
    call("label", where, "beta", "2")
    call("label", where, "beta")
    assert read_serving(folder).labels == {}
    call("policy", where, "specific", "1", "2")
    assert served_numbers(read_serving(folder), [1, 2, 10]) == [1, 2]
    call("policy", where, "all")
    found = json.loads(call("list", where, "--json"))
    assert [(row["version"], row["served"]) for row in found] == [(1, True), (2, True), (10, True)]
    assert "version.json does not exist" in call("list", where)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("promote", "{}", "3"), "has no version 3: it has 1, 2, 10"),
        (("label", "{}", "../x", "1"), "must be letters, digits"),
        (("label", "{}", "beta", "1", "--percent", "3"), "belongs to the label canary"),
        (("policy", "{}", "latest", "1"), "only with it"),
        (("list", "{}/nothing"), "holds no version of a model"),
    ],
)
def test_mistakes_are_named(folder: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(*(word.format(folder) for word in words))


def test_what_no_server_reads_is_not_called_served(folder: Path) -> None:
    version = Version(
        kind="torch",
        made="2026-11-18T00:00:00+00:00",
        signature=Signature(shape=(2,)),
        output_shape=(2,),
        output_dtype="float32",
        tells_classes=False,
        network=None,
        origin=Origin(run="", update=1, epoch=1, commit=None, metrics={}),
        compared=Compared(samples=0, largest=0.0, tolerance=0.0),
        versions={},
    )
    write_json(folder / "10" / "version.json", version)
    found = json.loads(call("list", str(folder), "--json"))
    assert [row["version"] for row in found if row["served"]] == [2]
    call("rollback", str(folder))
    assert read_serving(folder).labels == {"stable": 1}
    for words in (["promote", str(folder), "10"], ["policy", str(folder), "specific", "10"]):
        with pytest.raises(ConfigError, match="no server reads"):
            call(*words)
