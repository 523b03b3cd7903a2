"""`paceline doctor --hosts` in the lab: real links of known rates, and hosts that are not there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab import Lab
from paceline.lab.testing import make_lab

__all__ = ["make_lab"]
pytestmark = pytest.mark.lab
DOCTOR = [sys.executable, "-m", "paceline.cli", "doctor", "--hosts"]


@pytest.mark.slow
def test_a_slow_host_some_that_do_not_answer_and_one_that_dies(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    lab = make_lab("a", "b", {"name": "c", "rate": "10mbit"}, rate="100mbit")
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(
        "[[host]]\nname = 'a'\n[[host]]\nname = 'b'\n[[host]]\nname = 'c'\n"
        "[[host]]\nname = 'bare'\naddress = 'b'\npython = '/nowhere/python'\n"
        "[[host]]\nname = 'lost'\n"
    )
    done = lab.run([*DOCTOR, str(hosts), "--json"], capture_output=True, timeout=600)
    assert done.returncode == 2, done.stderr
    assert b"Traceback" not in done.stderr
    report = json.loads(done.stdout)
    facts = {host["name"]: host for host in report["hosts"]}
    assert (facts["b"]["address"], facts["b"]["interface"]) == (lab.addresses["b"], "eth0")
    assert facts["b"]["versions"] == facts["a"]["versions"]
    assert facts["b"]["clock_seconds"] == 0  # it is the same clock
    # A rate is a ceiling; the burst of the token bucket is let through on top of it.
    rates = {link["from"] + link["to"]: link["megabits"] for link in report["links"]}
    assert sorted(rates) == ["ab", "ac", "ba", "bc", "ca", "cb"]
    assert all(0 < rates[pair] < 12 for pair in ("ac", "ca", "bc", "cb"))
    assert all(0 < rates[pair] < 120 for pair in ("ab", "ba"))
    problems = sorted(report["problems"])
    assert len(problems) == 2
    assert problems[0].startswith("host bare does not answer:")
    assert "paceline hosts setup" in problems[0]
    assert problems[1].startswith("host lost does not answer:")
    assert "give `address` in hosts.toml" in problems[1]

    lab.kill("c")
    done = lab.run([*DOCTOR, "lab"], capture_output=True, timeout=600)
    assert done.returncode == 2
    text = done.stdout.decode()
    assert "Mbit/s and round trip" in text
    assert "built in" in text
    assert text.count("problem:") == 1
    assert "problem: host c does not answer:" in text
    assert b"Traceback" not in done.stderr
