"""Strategies, exchanges and engines of other packages are found by their entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.schema import NodePlan, decode
from paceline.schema.config import LocalSettings
from paceline.schema.exchanges import EXCHANGES
from paceline.schema.strategies import STRATEGIES, Strategy, describe

TABLE = """
from paceline.schema.strategies import Strategy

CAREFUL = Strategy(
    place="other_package.careful:Careful", title="careful {threads}", options=("threads",),
    is_plain=True,
)
BROKEN = "no strategy"
"""
CAREFUL = """
from paceline.local.single import Threads


class Careful(Threads):
    def __init__(self, job):
        super().__init__(job)
        print("carefully", job.node.threads, flush=True)
"""
POINTS = """
[paceline.strategies]
careful = other_package.table:CAREFUL
broken = other_package.table:BROKEN
threads = other_package.table:BROKEN

[paceline.exchanges]
shout = other_package.shout:Shout

[paceline.engines]
pigeon = other_package.pigeon:PigeonEngine

[paceline.commands]
greet = other_package.commands:greet
lost = other_package.nowhere:lost
train = other_package.commands:greet
"""
COMMANDS = """
import click


@click.command()
@click.option("--who", default="you")
def greet(who):
    \"\"\"Say hello. And no more.\"\"\"
    print("hello", who)
"""
ASKS = """
import json
from paceline import local
from paceline.errors import PacelineError
from paceline.launch.engines import ENGINES
from paceline.schema.exchanges import EXCHANGES
from paceline.schema.strategies import STRATEGIES

def said(name):
    try:
        return local.strategy_class(name).__name__
    except PacelineError as error:
        return str(error)

own, found = said("threads"), said("broken")
print(json.dumps([list(STRATEGIES), list(EXCHANGES), list(ENGINES), own, found]))
"""


@pytest.fixture
def other_package(tmp_path: Path) -> Path:
    """A folder as pip leaves one, with a package that adds something of each kind."""
    package = tmp_path / "site" / "other_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "table.py").write_text(TABLE)
    (package / "careful.py").write_text(CAREFUL)
    (package / "commands.py").write_text(COMMANDS)
    information = tmp_path / "site" / "other_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: other_package\nVersion: 1\n"
    )
    (information / "entry_points.txt").write_text(POINTS)
    return tmp_path / "site"


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    place = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *words],
        cwd=site.parent,
        env=os.environ | {"PYTHONPATH": place},
        capture_output=True,
        text=True,
    )


def test_another_package_adds_names_and_replaces_none(other_package: Path) -> None:
    done = run(other_package, "-c", ASKS)
    assert done.returncode == 0, done.stderr
    strategies, exchanges, engines, threads, broken = json.loads(done.stdout)
    assert strategies == [*STRATEGIES.own, "careful", "broken"]
    assert exchanges == [*EXCHANGES.own, "shout"]
    assert engines[-1] == "pigeon"
    assert threads == "Threads"
    assert "entry point 'broken' of paceline.strategies is str, but must be Strategy" in broken


def test_a_strategy_of_another_package_trains(other_package: Path) -> None:
    words = ("-m", "paceline.cli", "train", "--run", "mine", "--set", "train.steps=2")
    done = run(other_package, *words, "--set", "local.strategy=careful", "--set", "local.threads=1")
    assert done.returncode == 0, done.stderr
    assert "carefully 1" in done.stdout
    plan = json.loads((other_package.parent / "mine" / "plan.json").read_text())
    assert plan["nodes"][0]["strategy"] == "careful"


def test_a_command_of_another_package_is_listed_and_runs(other_package: Path) -> None:
    listed = run(other_package, "-m", "paceline", "--help")
    assert listed.returncode == 0, listed.stderr
    assert "  greet       Say hello.\n" in listed.stdout
    assert "  lost        command 'lost' cannot be imported" in listed.stdout
    assert listed.stdout.count("\n  train ") == 1
    done = run(other_package, "-m", "paceline", "greet", "--who=me")
    assert (done.returncode, done.stdout) == (0, "hello me\n")
    lost = run(other_package, "-m", "paceline", "lost")
    assert lost.returncode == 2
    assert lost.stderr.startswith("paceline: command 'lost' cannot be imported from 'other_package")
    assert "--resume" in run(other_package, "-m", "paceline", "train", "--help").stdout


def test_a_name_that_nobody_has_is_refused_with_all_names() -> None:
    with pytest.raises(
        ConfigError, match=r"local.strategy = 'thread' is not one.*auto, sequential"
    ):
        decode(LocalSettings, {"strategy": "thread"}, "local")


def test_a_plan_of_a_package_that_is_not_here_can_be_told() -> None:
    assert describe(NodePlan(strategy="care{ful}")) == "care{ful}"
    assert NodePlan(strategy="careful").ranks == 1


@pytest.mark.parametrize("name", STRATEGIES.own)
def test_every_title_and_option_is_of_a_plan(name: str) -> None:
    strategy: Strategy = STRATEGIES[name]
    assert describe(NodePlan(strategy=name)).startswith(name)
    fields = set(vars(NodePlan()))
    assert {*strategy.options, *strategy.ranks} <= fields
    assert strategy.copies in {*fields, ""}
