"""Engines that have a cluster: what they are asked for, and what is refused. Real clusters:
tests/engines."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from paceline.commands.train import hosts_request
from paceline.errors import ConfigError, PacelineError
from paceline.launch.clusters import visit
from paceline.launch.clusters.engine import RayEngine, SparkEngine, Survey


@pytest.mark.parametrize(
    ("engine", "module"),
    [(RayEngine(), "ray"), (SparkEngine("spark://localhost:7077"), "pyspark")],
)
def test_what_is_not_installed_is_named_with_the_command(
    engine: RayEngine | SparkEngine, module: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed here")
    with pytest.raises(PacelineError, match=rf"pip install 'paceline\[{engine.name}\]'"):
        engine.survey(Survey(run=tmp_path, wanted={}))


@pytest.mark.parametrize(
    ("hosts", "engine", "options", "words"),
    [
        ("a,b", "ray", {}, "names its hosts itself: leave hosts 'a,b' out"),
        (None, "spark", {}, "must know its cluster: --master spark://host:7077"),
        (None, "ray", {"--master": "spark://x:1"}, "--master belongs to --engine spark"),
        ("a,b", "ssh", {"--address": "auto"}, "--address belongs to --engine ray"),
    ],
)
def test_options_that_contradict_are_refused(
    hosts: str | None, engine: str, options: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        hosts_request(hosts, engine, None, "", options)
    assert words in str(caught.value)


def test_a_cluster_is_asked_for_all_or_some_of_its_nodes() -> None:
    request = hosts_request(None, "ray", 3, "", {"--address": "10.0.0.1:6379"})
    assert request is not None
    assert (request.options, request.nodes, request.hosts.host) == (("10.0.0.1:6379",), 3, ())


def test_what_a_worker_is_asked_and_cannot_answer() -> None:
    found = visit.ask(["no_such_module_of_ours"], {}, 60.0)
    assert "No module named no_such_module_of_ours" in found["failure"]


def test_what_an_agent_said_last_is_brought_back() -> None:
    said = visit.work(["paceline.launch.agent", "--to", "localhost:1", "--node", "0"], {})
    assert "ended with code 2" in said
    assert "must be told the run's secret" in said
    assert sys.executable not in said
