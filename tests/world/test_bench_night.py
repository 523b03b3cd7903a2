"""A short night: a host leaves and comes back, another one is throttled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lab.night import Event, host_seconds, schedule
from paceline.lab.testing import skip_without_namespaces


def test_every_departure_has_its_return() -> None:
    events = schedule(600, departures=6, throttles=2)
    assert len(events) == 16
    assert [event.at for event in events] == sorted(event.at for event in events)
    away = [event for event in events if event.host == "c"]
    assert [event.what for event in away] == ["leaves", "returns"] * 6
    assert host_seconds("c", events, 0, 600) == pytest.approx(600 - 6 * 40)
    assert host_seconds("b", events, 0, 600) == pytest.approx(600 - 2 * 90 * 2 / 3)
    assert host_seconds("a", events, 0, 600) == 600


def test_only_the_stretch_that_was_asked_for_counts() -> None:
    events = [Event(10, "c", "leaves"), Event(30, "c", "returns")]
    assert host_seconds("c", events, 20, 50) == 20
    assert host_seconds("c", events, 0, 5) == 5


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.timeout(1200)
def test_a_short_night(run_cli, tmp_path: Path) -> None:
    skip_without_namespaces()
    words = ["--minutes", "1.5", "--departures", "1", "--throttles", "1", "--json"]
    done = run_cli("bench", "night", *words, "--keep", str(tmp_path / "night"), timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["outcome"]["equal"] is True
    assert (found["departures"], found["returns"]) == (1, 1)
    assert [event["what"] for event in found["events"] if event["host"] == "c"] == [
        "leaves",
        "returns",
    ]
    assert 0 < found["goodput"] <= 1
