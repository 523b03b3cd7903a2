"""Real clusters on the hosts of a lab: Ray's and Spark's own daemons, ended with the lab."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from paceline.lab import Lab
from paceline.lab.process import LabProcess

BIN = Path(sys.executable).parent
PORT = 6379
MASTER_PORT = 7077
# A JVM that starts fast matters here more than one that runs fast.
JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class TestedCluster:
    """Daemons on every host of a lab, and where to train on them."""

    __test__ = False
    engine = ""
    environment: Mapping[str, str] = MappingProxyType({})
    """For what trains on it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        # Short: paths of sockets may not be longer than about a hundred characters.
        self.folder = Path(tempfile.mkdtemp(prefix="cl-", dir="/tmp"))
        self.daemons: list[LabProcess] = []

    def close(self) -> None:
        """Remove what the daemons have written; they themselves end with the lab."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def start(self, name: str, words: list[str], host: str, env: Mapping[str, str]) -> None:
        with self.log(name).open("wb") as output:
            stream = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            self.daemons.append(self.lab.start(words, on=host, env=env, **stream))

    def run(self, words: list[str]) -> subprocess.CompletedProcess[bytes]:
        """A command on the first host, to its end."""
        return self.lab.run(words, env=self.environment, capture_output=True, timeout=900)

    def await_log(self, name: str, pattern: str) -> None:
        wait(lambda: re.search(pattern, self.log(name).read_text()), self.log(name))

    def words(self) -> list[str]:
        """The options that say where to train."""
        raise NotImplementedError


class RayCluster(TestedCluster):
    """`ray start --head` on the first host, `ray start --address` on the others."""

    engine = "ray"
    environment = MappingProxyType({"RAY_USAGE_STATS_ENABLED": "0"})

    def open(self) -> RayCluster:
        first, *others = self.lab.addresses
        head = ["--head", "--port", str(PORT), "--include-dashboard=false"]
        self.ray_start(first, [*head, "--temp-dir", str(self.folder / "ray")])
        for host in others:
            self.ray_start(host, ["--address", f"{self.lab.addresses[first]}:{PORT}"])
        return self

    def ray_start(self, host: str, words: list[str]) -> None:
        own = ["--node-ip-address", self.lab.addresses[host], "--num-cpus", "1", "--block"]
        store = ["--object-store-memory", "80000000", "--disable-usage-stats"]
        line = [str(BIN / "ray"), "start", *words, *own, *store]
        self.start(f"ray-{host}", line, host, self.environment)
        self.await_log(f"ray-{host}", "Ray runtime started")

    def words(self) -> list[str]:
        first = next(iter(self.lab.addresses.values()))
        return ["--engine", "ray", "--address", f"{first}:{PORT}"]


class SparkCluster(TestedCluster):
    """A standalone master on the first host, a worker on every host."""

    engine = "spark"

    def open(self) -> SparkCluster:
        self.first = next(iter(self.lab.addresses))
        settings = [f"spark.{kind}.extraJavaOptions {JAVA}\n" for kind in ("driver", "executor")]
        (self.folder / "spark-defaults.conf").write_text(
            "".join([*settings, "spark.driver.memory 512m\n"])
        )
        self.environment = {"SPARK_CONF_DIR": str(self.folder)}
        address = self.lab.addresses[self.first]
        port = ["--port", str(MASTER_PORT), "--webui-port", "8080"]
        self.daemon("master", self.first, ["master.Master", "--host", address, *port])
        self.await_log("master", "I have been elected leader")
        for host in self.lab.addresses:
            self.worker(host)
        return self

    def worker(self, host: str) -> None:
        own = ["--host", self.lab.addresses[host], "--cores", "1", "--memory", "1g"]
        where = ["--work-dir", str(self.folder / f"work-{host}"), *self.words()[-1:]]
        self.daemon(f"worker-{host}", host, ["worker.Worker", *own, *where])
        self.await_log(f"worker-{host}", "Successfully registered with master")

    def daemon(self, name: str, host: str, words: list[str]) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        line = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{words[0]}"]
        env = {
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_DIRS": str(self.folder / f"local-{host}"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": JAVA,
            "PYSPARK_PYTHON": sys.executable,
        }
        self.start(name, [*line, *words[1:]], host, env)

    def words(self) -> list[str]:
        address = self.lab.addresses[self.first]
        return ["--engine", "spark", "--master", f"spark://{address}:{MASTER_PORT}"]


KINDS: dict[str, type[RayCluster] | type[SparkCluster]] = {
    "ray": RayCluster,
    "spark": SparkCluster,
}


def wait(condition: Callable[[], object], log: Path | None = None, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        said = log.read_text() if log is not None and log.exists() else ""
        assert time.monotonic() < end, f"it did not happen: {said}"
        time.sleep(0.05)
