"""`python -m paceline.launch.clusters.spark_driver`: agents as tasks of one barrier stage.

Every free core of the application is a task, so that Spark knows they are taken; the first task of
each host runs its agent, the others wait for it. Spark ends all tasks of such a stage with the
first that is lost: the training is then started again on the hosts that are left.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.config.environment import java_home
from paceline.errors import UserError
from paceline.launch.clusters import visit
from paceline.launch.clusters.driver import CHECKS, Cluster, Table, is_asked, say, serve
from paceline.launch.clusters.visit import ask, work
from paceline.launch.control import addresses_towards
from paceline.secure.addresses import own_addresses, resolved

EXECUTOR_SECONDS = 180.0
"""How long executors have to come: each is a JVM that a busy host starts slowly ..."""
STEADY_SECONDS = 10.0
"""... and for how long no further one, where nobody has said how many there are."""
SETTINGS = {
    # One attempt: an agent that is started a second time would find its place taken.
    "spark.task.maxFailures": "1",
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.task.cpus": "1",
    "spark.speculation": "false",
    "spark.dynamicAllocation.enabled": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # A silent executor is noticed about when our own heartbeats notice its agent.
    "spark.executor.heartbeatInterval": "3s",
    "spark.network.timeout": "30s",
    "spark.network.timeoutInterval": "5s",
}


class SparkCluster(Cluster):
    """An application of our own on a Spark cluster."""

    def __init__(self, master: str) -> None:
        self.master = master
        self._context: Any = None

    def _connect(self) -> Any:
        if java_home() is None and shutil.which("java") is None:
            raise UserError(
                "Spark needs Java 17, and there is no `java` here: install it (Debian: apt-get"
                " install openjdk-17-jre-headless), or set JAVA_HOME"
            )
        from pyspark import SparkConf, SparkContext, cloudpickle

        cloudpickle.register_pickle_by_value(visit)
        conf = SparkConf().setMaster(self.master).setAppName("paceline")
        for key, value in SETTINGS.items():
            conf.set(key, value)
        hosts = re.findall(r"(?:spark://|,)([^:,/]+|\[[^\]]+\])", self.master)
        if hosts:  # its own name often leads to an address that executors cannot reach
            address = next(iter(resolved(hosts[0]) & set(own_addresses())), None)
            address = address or addresses_towards(hosts)[0]
            conf.set("spark.driver.host", address).set("spark.driver.bindAddress", address)
        context = SparkContext(conf=conf)
        context.setLogLevel("ERROR")
        return context

    def _slots(self) -> int:
        """Tasks that can run at the same time."""
        core = self._context._jsc.sc()
        return int(
            core.maxNumConcurrentTasks(core.resourceProfileManager().defaultResourceProfile())
        )

    def _executors(self) -> int:
        status = self._context._jsc.sc().statusTracker()
        others = 0 if self.master.startswith("local") else 1  # the driver is listed too
        return len(status.getExecutorInfos()) - others

    def _await_executors(self, nodes: int | None) -> None:
        begin = changed = time.monotonic()
        before = 0
        while True:
            slots, now = self._slots(), time.monotonic()
            if slots != before:
                before, changed = slots, now
            if slots and nodes is not None and self._executors() >= nodes:
                return
            if slots and nodes is None and now - changed > STEADY_SECONDS:
                return
            if now - begin > EXECUTOR_SECONDS:
                break
            time.sleep(0.1)
        if not before:
            raise UserError(
                f"the Spark cluster at --master {self.master} has given no core within"
                f" {EXECUTOR_SECONDS:.0f} s: other applications hold them (a notebook's own session"
                " too), or it has no workers"
            )

    def hosts(self, survey: Table) -> list[Table]:
        if self._context is None:
            self._context = self._connect()
        self._await_executors(survey["nodes"])
        words, variables, seconds = (
            [CHECKS, survey["wanted"]],
            survey["variables"],
            survey["seconds"],
        )

        def answer(address: str) -> Table:
            return ask(words, variables, seconds)

        return [
            {
                "name": facts.get("host") or address,
                "address": address,
                "cpus": cpus,
                "facts": facts,
            }
            for address, cpus, facts in sorted(self._on_each(answer), key=lambda each: each[0])
            if is_asked(survey, address)
        ]

    def _on_each(self, function: Callable[[str], Any]) -> list[tuple[str, int, Any]]:
        """What a function gives on every host, with the cores that we have there."""
        slots = self._slots()
        tasks = self._context.parallelize(range(slots), slots).barrier()
        return list(tasks.mapPartitions(_first_of_host(function)).collect())

    def run(self, agents: Sequence[Table], words: list[str], variables: dict[str, str]) -> None:
        nodes = {agent["address"]: agent["node"] for agent in agents}

        def agent(address: str) -> str:
            if address not in nodes:
                return ""
            return work([*words, "--node", str(nodes[address])], variables)

        for address, _, failure in self._on_each(agent):
            if failure:
                say(f"{address}: {failure}")

    def close(self) -> None:
        if self._context is not None:
            self._context.stop()


def _first_of_host(function: Callable[[str], Any]) -> Callable[[Any], Iterator[Any]]:
    """Each host's first task does it, and holds the others' cores meanwhile."""

    def task(rows: Any) -> Iterator[tuple[str, int, Any]]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        number = context.partitionId()
        places = [info.address.rpartition(":")[0] for info in context.getTaskInfos()]
        address = places[number]
        if places.index(address) == number:
            found = function(address)
            context.barrier()
            return iter([(address, places.count(address), found)])
        context.barrier()
        return iter([])

    return task


def main() -> int:
    """Serve the launcher."""
    parser = argparse.ArgumentParser(prog="paceline.launch.clusters.spark_driver")
    parser.add_argument("--master", required=True)
    return serve(SparkCluster(parser.parse_args().master))


if __name__ == "__main__":
    sys.exit(main())
