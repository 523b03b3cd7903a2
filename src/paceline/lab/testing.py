"""Labs for tests.

Import the fixture into a test module (or a conftest) and ask it for hosts:

    from paceline.lab.testing import make_lab  # noqa: F401

    @pytest.mark.lab
    def test_names(make_lab):
        lab = make_lab("a", "b", rate="100mbit")
        assert lab.run(["hostname"], on="b", capture_output=True).stdout == b"b\\n"

Labs are taken down when the test ends. Where this machine cannot make one, the
test is skipped with the reason.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.lab import probe
from paceline.lab.cluster import Lab
from paceline.lab.construction import PREFIX
from paceline.lab.leftovers import find_groups, find_states
from paceline.lab.spec import LabSpec


def lab_spec(*hosts: str | dict[str, Any], **link: str) -> LabSpec:
    """A lab from names or host tables, and the keys of its link.

    >>> lab_spec("a", {"name": "b", "cores": 0.5}, rate="1gbit").host("b").cores
    0.5
    """
    tables = [{"name": host} if isinstance(host, str) else host for host in hosts]
    return LabSpec.from_tables({"host": tables, "link": link})


@functools.cache
def _obstacle() -> str | None:
    return probe.namespace_obstacle()


def skip_without_namespaces() -> None:
    """Skip the test, with the reason, where hosts cannot be namespaces."""
    reason = _obstacle()
    if reason is not None:
        pytest.skip(f"no lab on this machine: {reason}")


@pytest.fixture
def make_lab() -> Iterator[Callable[..., Lab]]:
    """Opens labs: `make_lab("a", "b", rate="1gbit")`, or with a LabSpec or the path of a file."""
    with contextlib.ExitStack() as stack:

        def make(*hosts: Any, plain: bool = False, **link: str) -> Lab:
            if not plain:
                skip_without_namespaces()
            if hosts and isinstance(hosts[0], LabSpec):
                spec = hosts[0]
            elif hosts and isinstance(hosts[0], Path):
                spec = LabSpec.load(hosts[0])
            else:
                spec = lab_spec(*hosts, **link)
            return stack.enter_context(Lab(spec, plain=plain))

        yield make


def leftovers_of(pid: int) -> list[str]:
    """What a lab of that process has left: directories, control groups, processes."""
    name = f"{PREFIX}{pid}-"
    found = [str(path) for path in (*find_states(), *find_groups()) if path.name.startswith(name)]
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
                if name.encode() in words:
                    found.append(f"process {path.name}")
    return found
