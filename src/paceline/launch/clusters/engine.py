"""The launcher's side of a cluster: its driver started, its hosts found, its agents begun."""

from __future__ import annotations

import importlib.util
import json
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from paceline.config.environment import passed_variables, spark_python
from paceline.errors import LostError, UnsupportedError, UserError
from paceline.launch.engines import Command, Engine, Launch, Running, StartedProcesses, tail
from paceline.launch.inspection import FACTS, Inspection, apart, with_remedy
from paceline.schema.hosts import Host, Hosts
from paceline.schema.plain import ONE_LINE, checked, parse_json

ANSWER_SECONDS = 45.0
"""How long a host of the cluster has to say what it is ..."""
CONNECT_SECONDS = 300.0
"""... and the cluster to let us in and name its hosts."""
FOUND = {"hosts": [{"name": ONE_LINE, "address": ONE_LINE, "cpus": int, "facts": {}}]}


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Which hosts of a cluster are wanted."""

    run: Path
    """Where the driver's log goes."""
    wanted: dict[str, Any]
    """What the checks must know of a configuration (`inspection.wanted_facts`)."""
    nodes: int | None = None
    """How many; all when it is left out."""
    only: Mapping[str, str] | None = None
    """Names by addresses of those that are left of a training that is started again."""


class ClusterEngine(Engine):
    """Starts agents inside a cluster that runs already, on hosts that it names."""

    finds_hosts = True
    program: ClassVar[str]
    """The module that is its driver."""
    package: ClassVar[str]
    """What must be installed, as pip's extra is called too."""
    module: ClassVar[str]
    option: ClassVar[str]
    """The command line's option that says where the cluster is."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._driver: Driver | None = None

    def command_lines(self, launch: Launch) -> list[Command]:
        addresses = {place.host.network_address: place.host.name for place in launch.places}
        survey = _question(Survey(run=launch.run, wanted={}, only=addresses))
        late = launch.places[0].node
        label = f"{self.name}-{late}" if late else self.name
        return [self._command(label, survey + self._order(launch))]

    def _order(self, launch: Launch) -> str:
        """What the driver is told to start."""
        agents = [
            {"node": place.node, "address": place.host.network_address} for place in launch.places
        ]
        order = {
            "agents": agents,
            "words": launch.agent()[2:],
            "variables": {**passed_variables(), **launch.variables},
        }
        return json.dumps(order) + "\n"

    def _command(self, label: str, told: str = "") -> Command:
        words = [sys.executable, "-m", self.program, self.option, self.address]
        return Command(label=label, words=words, told=told, variables=self.variables())

    def variables(self) -> dict[str, str]:
        """What the driver must find in its environment."""
        return {}

    def survey(self, survey: Survey) -> tuple[Hosts, Inspection]:
        """The hosts of the cluster and what they say of themselves.

        Its driver stays, and starts the agents there: `close` ends it where that never happens.
        """
        if importlib.util.find_spec(self.module) is None:
            raise UnsupportedError(
                f"engine {self.name!r} needs {self.package}, which is not installed here: pip"
                f" install 'paceline[{self.name}]'"
            )
        self._driver = Driver(self._command(self.name), survey.run)
        try:
            return self._surveyed(self._driver, survey)
        except BaseException:
            self.close()
            raise

    def _surveyed(self, driver: Driver, survey: Survey) -> tuple[Hosts, Inspection]:
        asked = time.time()
        again = survey.only is not None
        answer = driver.ask(_question(survey), CONNECT_SECONDS + ANSWER_SECONDS)
        if "error" in answer:
            kind = LostError if again else UserError
            raise kind(f"engine {self.name!r}: {answer['error']}")
        found = [
            {**each, "name": (survey.only or {}).get(each["address"], each["name"])}
            for each in checked(answer, FOUND)["hosts"]
        ]
        facts: dict[str, dict[str, Any]] = {}
        failures: dict[str, str] = {}
        for each in found:
            try:
                facts[each["name"]] = checked(each["facts"], FACTS)
            except ValueError as error:
                said = each["facts"].get("failure")
                failures[each["name"]] = with_remedy(str(said)) if said else str(error)
        if again:  # go on with those that can
            found = [each for each in found if each["name"] in facts]
        if survey.nodes is not None and not again:
            found = found[: survey.nodes]
            if len(found) < survey.nodes:
                raise UserError(
                    f"--nodes {survey.nodes}: the cluster at {self.option} {self.address} has"
                    f" {len(found)} with a free CPU: ask for fewer, or add some"
                )
        names = {each["name"] for each in found}
        now = time.time()
        return _hosts(found), Inspection(
            facts={name: of for name, of in facts.items() if name in names},
            failures={name: why for name, why in failures.items() if name in names},
            clocks={name: apart(facts[name]["time"], asked, now) for name in names & facts.keys()},
        )

    def start(self, launch: Launch) -> Running:
        assert self._driver is not None, "a cluster is asked for its hosts first"
        driver, self._driver = self._driver, None
        driver.tell(self._order(launch))
        return driver

    def close(self) -> None:
        """End a driver that was asked and will start nothing."""
        if self._driver is not None:
            self._driver.end()
            self._driver = None


def _question(survey: Survey) -> str:
    """The driver's first order."""
    only = survey.only
    question = {
        "wanted": json.dumps(survey.wanted),
        "variables": passed_variables(),
        "nodes": survey.nodes if only is None else len(only),
        "only": None if only is None else sorted(only),
        "seconds": ANSWER_SECONDS,
    }
    return json.dumps({"survey": question}) + "\n"


def _hosts(found: list[dict[str, Any]]) -> Hosts:
    """A node on each, with as many cores as the cluster gives us there."""
    return Hosts(
        host=tuple(
            Host(name=each["name"], address=each["address"], cores=each["cpus"]) for each in found
        )
    )


class RayEngine(ClusterEngine):
    """Agents are actors of a placement group, one on each node of a Ray cluster."""

    name = "ray"
    program = "paceline.launch.clusters.ray_driver"
    package = "Ray"
    module = "ray"
    option = "--address"

    def __init__(self, address: str = "auto") -> None:
        super().__init__(address)


class SparkEngine(ClusterEngine):
    """Agents are barrier tasks, one on each worker of a Spark cluster."""

    name = "spark"
    outlives_a_loss = False  # a barrier stage ends as a whole
    program = "paceline.launch.clusters.spark_driver"
    package = "PySpark"
    module = "pyspark"
    option = "--master"

    def variables(self) -> dict[str, str]:
        return spark_python()


class Driver(StartedProcesses):
    """A driver's process, which answers before it starts anything."""

    def __init__(self, command: Command, run: Path) -> None:
        self._name = command.label
        super().__init__([command], run)
        self._input = self._processes[0].stdin
        self._output = self._processes[0].stdout

    def streams(self, command: Command, log: Any) -> dict[str, Any]:
        return {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}

    def ask(self, question: str, seconds: float) -> dict[str, Any]:
        """The answer to an order."""
        self.tell(question, last=False)
        assert self._output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            line = self._output.readline() if selector.select(seconds) else b""
        if line:
            return dict(parse_json(line))
        code = self._processes[0].poll()
        why = f"has ended with code {code}" if code is not None else "does not answer"
        raise UserError(f"the driver of {self._name} {why}: {tail(self._logs[0]) or 'no word'}")

    def tell(self, text: str, *, last: bool = True) -> None:
        """Give it an order; after the last its input is closed."""
        assert self._input is not None
        try:
            self._input.write(text.encode())
            self._input.flush()
            if last:
                self._input.close()
        except BrokenPipeError:  # its log tells why it ended
            return

    def end(self) -> None:
        for stream in (self._input, self._output) if self._processes else ():
            if stream is not None:
                stream.close()
        super().end()
