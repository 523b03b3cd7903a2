"""`paceline models` as a person and a program see it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline import models
from paceline.commands.models import command
from paceline.errors import ConfigError, ModelError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_list_is_plain_columns_when_piped() -> None:
    lines = run().splitlines()
    assert [line.split()[0] for line in lines] == ["name", *models.names()]
    assert "alexnet       61,100,840  244.4  3x224x224" in run()
    assert run().isascii()


def test_list_as_json() -> None:
    rows = json.loads(run("--json"))
    assert [row["name"] for row in rows] == models.names()
    assert rows[0]["parameters"] == 690_590
    assert "dropout" in rows[0]["options"]


def test_one_model_layer_by_layer() -> None:
    text = run("mnist_cnn")
    rows = [line.split() for line in text.splitlines()]
    assert ["features.0", "Conv2d", "32x26x26", "320", "0.001", "0.0002"] in rows
    assert ["features.8", "MaxPool2d", "256x1x1"] in rows
    assert "690,590 parameters, 2.8 MB" in text


def test_one_model_as_json_with_changes() -> None:
    found = json.loads(
        run(
            *("resnet18", "--classes", "10", "--channels", "1", "--image-size", "28"),
            *("--option", "stem=small", "--json"),
        )
    )
    assert found["sample_shape"] == [1, 28, 28]
    assert found["layers"][0]["output_shape"] == [64, 28, 28]
    assert found["layers"][-1]["output_shape"] == [10]
    assert found["parameters"] == sum(layer["parameters"] for layer in found["layers"])


def test_a_model_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def build(classes, width=2):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.Linear(width, classes))\n"
    )
    reference = f"{tmp_path}/own.py:build"
    text = run(
        reference, "--channels", "1", "--image-size", "4", "--classes", "3", "--option", "width=5"
    )
    assert "103 parameters" in text
    with pytest.raises(ModelError, match="cannot take a sample of 3x224x224"):
        run(reference)


def test_bad_requests() -> None:
    with pytest.raises(ModelError, match="did you mean 'alexnet'"):
        run("alexnte")
    with pytest.raises(ConfigError, match="must be KEY=VALUE"):
        run("vgg16", "--option", "dropout")
    with pytest.raises(ModelError, match="at least 63"):
        run("alexnet", "--image-size", "28")
    result = CliRunner().invoke(command, ["--classes", "3"])
    assert result.exit_code == 2
    assert "need a NAME" in result.output
    assert CliRunner().invoke(command, ["vgg16", "--classes", "0"]).exit_code == 2
