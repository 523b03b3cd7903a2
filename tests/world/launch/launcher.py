"""A launcher for tests, in a process of its own or in the test's: stand-ins on hosts.

python launcher.py RUN HOSTS ENGINE
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import paceline
from paceline.api import HostsRequest
from paceline.config.hosts import find_hosts
from paceline.errors import PacelineError
from paceline.launch.session import HostOrder, Session
from paceline.run import RunDirectory
from paceline.schema import NodePlan, Plan
from paceline.workflow.spread import choose_engine

HERE = Path(__file__).parent
# Agents must find the stand-in, and the same Paceline as this process.
PYTHONPATH = os.pathsep.join([str(HERE), str(Path(paceline.__file__).parent.parent)])


def run_standins(
    run: Path,
    hosts_text: str,
    engine: str,
    lines: list[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Run the stand-ins that RUN/standin.json describes; what they print goes to `lines`."""
    hosts = find_hosts(hosts_text)
    nodes = tuple(NodePlan(host=place.host.name) for place in hosts.places)
    order = HostOrder(
        run=RunDirectory(run),
        hosts=hosts,
        config='name = "test"\n',
        plan=lambda session: (Plan(nodes=nodes), None),
        program="standin",
        say=say,
        show=print if lines is None else lines.append,
        start_seconds=60.0,
    )
    return Session(order, choose_engine(HostsRequest(hosts=hosts, engine=engine), None)).run()


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = PYTHONPATH
    try:
        sys.exit(run_standins(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        sys.exit(130)
