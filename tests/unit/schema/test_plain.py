"""Bounds on everything that is read: one reason for each text that later code could not bear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.errors import ConfigError, RunDirectoryError
from paceline.schema import Plan, read_json
from paceline.schema.plain import (
    DEEPEST,
    LARGEST,
    MOST_TOML_BYTES,
    parse_json,
    parse_toml,
    parse_value,
    read_text,
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested more than"),
        ("[" * 500 + "]" * 500, "nested more than"),
        ('{"a":' * (DEEPEST + 2) + "1" + "}" * (DEEPEST + 2), "nested more than"),
        ("9" * 5000, "too large"),
        (str(LARGEST + 1), "at most 9223372036854775807"),
        (str(-LARGEST - 2), "too large"),
        ('"a\\u0000b"', "zero byte"),
        ('{"a\\u0000b": 1}', "zero byte"),
        ('"\\ud800"', "half a character"),
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ("{", "property name"),
        (b"\xff", "utf-8"),
    ],
)
def test_json_that_is_refused(text: str | bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 500


def test_json_that_is_read() -> None:
    nested = json.dumps([[{"a": LARGEST, "b": -LARGEST, "c": [1.5, None, True, "\u00e9\n"]}]])
    assert parse_json(nested) == json.loads(nested)
    assert parse_json(b"1e999") == float("inf"), "files of older runs may hold it"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = " + "[" * 500 + "]" * 500, "nested more than"),
        ("a = " + "[" * 60_000, "nested more than"),
        (".".join(["a"] * 100_000) + " = 1", "more than 64 parts"),
        ("[" + ".".join(["a"] * 100_000) + "]", "more than 64 parts"),
        ("x = {" + '"!".' * 100_000 + "a = 1}", "more than 64 parts"),
        (f"a = {'9' * 5000}", "too large"),
        (f"a = 0x{'f' * 5000}", "too large"),
        ('a = "x\\u0000y"', "zero byte"),
        ("a = 1979-05-27", "write it as a text"),
        ("a = 1\na = 2", "overwrite"),
        ("#" * (MOST_TOML_BYTES + 1), "longer than 1 MB"),
    ],
)
def test_toml_that_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_toml(text)
    assert len(str(caught.value)) < 500


def test_a_file_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="larger than 1 MB"):
        read_text(Path("/dev/zero"), 2**20)
    with pytest.raises(ConfigError, match=r"/dev/zero.*larger than 1 MB"):
        load_config(Path("/dev/zero"))
    with pytest.raises(RunDirectoryError, match=r"/dev/zero.*larger than 64 MB"):
        read_json(Plan, Path("/dev/zero"))
    with pytest.raises(RunDirectoryError, match="Is a directory"):
        read_json(Plan, tmp_path)


def test_a_value_on_the_line() -> None:
    assert parse_value("[1, 2]", "--set") == [1, 2]
    assert parse_value("1\nother = 2", "--set") == "1\nother = 2", "no second key slips in"
    with pytest.raises(ConfigError, match=r"^--set seed = 1979-05-27 cannot be used: "):
        parse_value("1979-05-27", "--set seed =")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("train.deadline=1e308", "train.deadline = 1e.308 is too large: it must be at most 604800"),
        ("observe.samples_every=1e-300", "at least 0.01 s"),
        ("exchange.bucket_mb=inf", "exchange.bucket_mb = inf must be a finite number"),
        ("data.image_size=1000000", "at most 16384"),
        (f"workload.classes={LARGEST}", "at most"),
        (f"name={'x' * 5000}", "at most 100 characters"),
        ('workload.data="a\\u0000b"', "zero byte"),
        (f"{'a.' * 100_000}a=1", "100001 parts: it must have 64 at most"),
        (f"workload.model_options.{'a.' * 500}a=1", "503 parts"),
        (f"{'a' * 100_000}=1", "unknown key"),
        (f"train.epochs={'9' * 5000}", "too large"),
        (f"workload.model={'[' * 5000}", "nested more than"),
    ],
)
def test_a_setting_out_of_bounds_is_one_short_sentence(change: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(None, [change])
    assert len(str(caught.value)) < 1500


def test_a_dotted_key_below_a_value() -> None:
    from paceline.config import config_from

    with pytest.raises(ConfigError, match=r"'train\.epochs': 'train' is a value"):
        config_from({"train": 1, "train.epochs": 2})


def test_keys_in_messages_are_as_short_and_plain_as_values() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"observe.\x1b[31m{'x' * 500} = {2**63}"])
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000
