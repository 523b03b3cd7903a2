"""Faults on the hosts of a lab: real trainings, real kills, and what came of each.

A cell is a way to exchange and a fault. Its training has four hosts and is given the fault once all
of them train; it must end by itself, with the weights of one process where its exchange is exact.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, PacelineError, unknown_name
from paceline.lab import Lab, LabSpec
from paceline.lab.process import LabProcess
from paceline.schema import read_json, write_json

HOSTS = ("a", "b", "c", "d")
VICTIM = "c"
"""Neither the first host, where the launcher is, nor the last."""
READY_SECONDS = 150.0
"""Until all hosts train."""
END_SECONDS = 300.0
"""From the fault to the end of the training."""
TIDY_SECONDS = 45.0
"""Until a host that was cut off has ended what it started: its links must be given up first."""
LOOK_SECONDS = 0.02
EQUAL = 1e-3
"""Of the largest weight: another order of sums, over hundreds of updates."""
_OURS = ("paceline.launch", "paceline.workflow.hosts_member", "mpiexec", "prted", "prterun")
_SHARED = re.compile(r"mpich_shm|mpich_shar|sm_segment|vader_segment|_ompi_")
_REPEATED = re.compile(r"\((\d+) updates? (?:are|is) done again\)")
SETTINGS: Mapping[str, object] = {
    "workload.model": "benchmarks.lab.sleeping:sleeping",
    "workload.model_options": "{}",
    "workload.data": "synthetic",
    "workload.batch_size": 32,
    "data.options": "{ shape = [1, 28, 28], samples = 160, test_samples = 20 }",
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 0.01,
    "optimizer.momentum": 0.9,
    "train.epochs": 70,
    "train.checkpoint_seconds": 5.0,
    "pilot.budget": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to exchange, as a user asks for it."""

    engine: str
    settings: Mapping[str, object]
    exact: bool = True
    """Its weights are those of one process."""
    legs: bool = True


def _kind(engine: str, exchange: str, **how: Any) -> Kind:
    legs = how.get("legs", True)
    more = dict(how.pop("settings", {}))
    strategy = {} if legs else {"local.strategy": "threads", "local.threads": 1}
    return Kind(engine=engine, settings={"exchange.kind": exchange, **strategy, **more}, **how)


KINDS: dict[str, Kind] = {
    "auto": _kind("auto", "allreduce"),
    "mpi": _kind("mpi", "allreduce"),
    "allreduce": _kind("ssh", "allreduce"),
    "ring": _kind("ssh", "ring"),
    "reduce_broadcast": _kind("ssh", "reduce_broadcast"),
    "fixed": _kind("ssh", "allreduce", legs=False),
    "averaging": _kind("ssh", "averaging", exact=False, legs=False),
    # A lost worker's part of the batches is left out.
    "server": _kind("ssh", "parameter_server", exact=False, legs=False),
}
"""By name; "auto" begins over MPI, "fixed" asks for a strategy, so that there are no legs."""


def _kill(process: str, host: str = VICTIM) -> Callable[[Lab], None]:
    def act(lab: Lab) -> None:
        for text in process.split():
            lab.signal(host, signal.SIGKILL, text)

    return act


def _for(seconds: float, begin: str, end: str) -> Callable[[Lab], None]:
    def act(lab: Lab) -> None:
        getattr(lab, begin)(VICTIM)
        time.sleep(seconds)
        getattr(lab, end)(VICTIM)

    return act


def _of_its_cell(lab: Lab) -> None:
    raise NotImplementedError("a cell of its own makes it happen")


_RANK = "paceline.workflow.hosts_member paceline.launch.member"
FAULTS: dict[str, Callable[[Lab], None]] = {
    "rank": _kill(_RANK),
    "agent": _kill("paceline.launch.agent"),
    "power": lambda lab: lab.kill(VICTIM),
    "shutdown": lambda lab: lab.shutdown(VICTIM),
    "cut 5 s": _for(5.0, "cut", "restore"),
    "cut": lambda lab: lab.cut(VICTIM),
    "cut 40 s": _for(40.0, "cut", "restore"),
    "stop 20 s": _for(20.0, "pause", "resume"),
    "first rank": _kill(_RANK, HOSTS[0]),
    "first agent": _kill("paceline.launch.agent", HOSTS[0]),
    "own link": lambda lab: lab.cut(HOSTS[0]),
    "launcher": _kill("paceline.cli", HOSTS[0]),
    "disk full": _of_its_cell,
    "node's disk full": _of_its_cell,
    "launcher's disk full": _of_its_cell,
}
"""By name: kill -9 of a rank or an agent, a host without power, its link cut, and so on."""


@dataclass(kw_only=True)
class Outcome:
    """What came of a cell."""

    kind: str
    fault: str
    seconds: float | None = None
    """Until training went on: the longest wait for an epoch's end, less the usual one."""
    repeated: int = 0
    """Updates that were done again."""
    code: int | None = None
    """Exit code; None: it did not end by itself."""
    equal: bool | None = None
    """Whether its weights are those of one process; None: they need not be, or there are none."""
    orphans: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    """Files."""
    ended_seconds: float | None = None
    """Where the launcher was killed: until nothing of the training ran any more."""
    is_hit: bool = False
    """The fault came while all hosts trained: else the cell says nothing."""
    note: str = ""
    """The last thing that was said of the loss."""

    @property
    def survived(self) -> bool:
        """It ended well after the fault, and left nothing."""
        well = self.is_hit and self.code == 0 and self.equal is not False
        return well and not self.orphans and not self.left


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a file of results holds."""

    outcomes: tuple[Outcome, ...] = ()


def chosen(only: Sequence[str]) -> list[tuple[str, str]]:
    """The cells that `--only` names: "mpi", "mpi/rank" or "/rank"; all where it names none."""
    every = [(kind, fault) for kind in KINDS for fault in FAULTS]
    found: list[tuple[str, str]] = []
    for text in only:
        kind, _, fault = text.partition("/")
        if kind and kind not in KINDS:
            raise ConfigError(unknown_name("exchange of --only", kind, KINDS))
        if fault and fault not in FAULTS:
            raise ConfigError(unknown_name("fault of --only", fault, FAULTS))
        found += [each for each in every if kind in ("", each[0]) and fault in ("", each[1])]
    return list(dict.fromkeys(found)) if only else every


def run_cells(
    cells: Sequence[tuple[str, str]],
    say: Callable[[str], None],
    keep: Path | None = None,
    out: Path | None = None,
) -> list[Outcome]:
    """Every cell in a lab of its own; the runs stay below `keep` where that is given.

    A cell that survived, as the results in `out` tell, is not run again.
    """
    from benchmarks.lab.deserted import Deserted
    from benchmarks.lab.full import Full, LaunchersFull, NodesFull

    own = {
        "launcher": Deserted,
        "disk full": Full,
        "node's disk full": NodesFull,
        "launcher's disk full": LaunchersFull,
    }
    kept = read_json(Kept, out).outcomes if out is not None and out.exists() else ()
    known = {(each.kind, each.fault): each for each in kept}
    left = [cell for cell in cells if cell not in known or not known[cell].survived]
    with tempfile.TemporaryDirectory(prefix="paceline-faults-") as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        expected = trained_alone(folder, SETTINGS) if left else {}
        for kind, fault in left:
            outcome = own.get(fault, Cell)(folder, kind, fault).run(expected)
            say(f"{kind} / {fault}: {sentence(outcome)}")
            known[kind, fault] = outcome
            if out is not None:
                write_json(out, Kept(outcomes=tuple(known.values())))
    return [known[cell] for cell in cells]


def sentence(outcome: Outcome) -> str:
    """One line of what came of a cell."""
    if not outcome.is_hit:
        return f"not hit: {outcome.note}"
    words = [f"exit code {outcome.code}" if outcome.code is not None else "it did not end"]
    if outcome.ended_seconds is not None:
        words = [outcome.note, f"--resume: {words[0]}"]
    elif outcome.seconds is not None:
        words.append(f"went on after {outcome.seconds:.1f} s")
    words.append(f"{outcome.repeated} updates repeated")
    if outcome.equal is not None:
        words.append("weights equal" if outcome.equal else "OTHER WEIGHTS")
    words += [f"left {name}" for name in (*outcome.orphans, *outcome.left)]
    return ", ".join(words)


def train_command(run: Path, settings: Mapping[str, object]) -> list[str]:
    words = [word for pair in settings.items() for word in ("--set", f"{pair[0]}={pair[1]}")]
    return [sys.executable, "-m", "paceline.cli", "train", "--run", str(run), *words]


def trained_alone(folder: Path, settings: Mapping[str, object]) -> dict[str, Any]:
    """The weights of one process."""
    run = folder / "alone"
    if not (run / "run.json").exists():
        quickly = {"local.strategy": "sequential", "workload.model_options": "{ seconds = 0.0 }"}
        settings = {**settings, **quickly}
        subprocess.run(train_command(run, settings), check=True, stdout=subprocess.DEVNULL)
    return weights_of(run)


def weights_of(run: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(run / "checkpoints" / "latest" / "model.safetensors")


def are_equal(run: Path, expected: Mapping[str, Any]) -> bool:
    found = weights_of(run)
    if found.keys() != expected.keys():
        return False
    apart = [
        float((found[name] - weight).abs().max() / weight.abs().max().clamp_min(1e-6))
        for name, weight in expected.items()
    ]
    return max(apart) < EQUAL


class Cell:
    """One training, and one fault."""

    cores = 0.5
    end_seconds = END_SECONDS

    def __init__(self, folder: Path, kind: str, fault: str) -> None:
        self.kind, self.how = kind, KINDS[kind]
        self.fault = fault
        self.settings: Mapping[str, object] = {**SETTINGS, **self.how.settings}
        name = f"{kind}-{fault}".replace(" ", "-").replace("'", "")
        self.run_path, self.log = folder / name, folder / f"{name}.log"
        self.cache = folder / "cache"
        self.hosts = "lab"
        self.epochs: list[float] = []
        """When each epoch's end was first seen."""
        self.before = 0
        """How many there were when the fault came, ..."""
        self.broken_at = self.broken_time = 0.0
        """... which was then: time.monotonic(), time.time()."""
        self.is_over = False
        self.ended_after = 0.0
        """Seconds from the fault to the command's end."""

    def prepare(self, lab: Lab) -> None:
        """What is done before the training starts."""

    def act(self, lab: Lab) -> None:
        """The fault itself, which may take its time."""
        FAULTS[self.fault](lab)

    def run(self, expected: Mapping[str, Any]) -> Outcome:
        """The training, its fault, and how it ended."""
        outcome = Outcome(kind=self.kind, fault=self.fault)
        shutil.rmtree(self.run_path, ignore_errors=True)  # of a try before this one
        hosts = [{"name": name, "cores": self.cores, "slots": 1} for name in HOSTS]
        spec = LabSpec.from_tables({"host": hosts, "link": {"rate": "1gbit"}})
        with Lab(spec) as lab, self.log.open("wb") as output:
            # What cells before have taught must not keep hosts out of this one.
            self.prepare(lab)
            words = ["--hosts", self.hosts, "--engine", self.how.engine, "-v", "--again"]
            command = [*train_command(self.run_path, self.settings), *words]
            process = lab.start(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"PACELINE_CACHE": str(self.cache)},
            )
            try:
                self._await(process, self.is_ready, READY_SECONDS, "all hosts trained")
                outcome.is_hit = True
                with self._broken(lab):
                    self.await_end(process)
                    self.ended_after = time.monotonic() - self.broken_at
            except TimeoutError as error:
                outcome.note = str(error)
            outcome.code = process.poll()
            if outcome.code is None:
                process.kill()
                process.wait(30)
            process.close()
            self.after(lab, outcome)
            self.judge(lab, outcome, expected)
        return outcome

    def after(self, lab: Lab, outcome: Outcome) -> None:
        """What is done once the command has ended."""

    def await_end(self, process: LabProcess) -> None:
        """Until the training has ended by itself."""
        self._await(process, lambda: False, self.end_seconds, "it ended", may_end=True)

    @contextlib.contextmanager
    def _broken(self, lab: Lab) -> Iterator[None]:
        """The fault happens beside what is inside: one that ends takes its time."""
        self.before = len(self.epochs)
        self.broken_at, self.broken_time = time.monotonic(), time.time()
        thread = threading.Thread(target=self.act, args=(lab,))
        thread.start()
        try:
            yield
        finally:
            self.is_over = True
            thread.join()

    def is_ready(self) -> bool:
        """Whether all hosts train."""
        if not self.how.legs:
            return len(self.epochs) >= 3
        with contextlib.suppress(OSError):
            for line in (self.run_path / "legs.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):
                    leg = json.loads(line)
                    if len(leg["plan"]["nodes"]) == len(HOSTS) and leg["updates"]:
                        return True
        return False

    def _look(self) -> None:
        """Note when epochs end: metrics.jsonl has a line for each, also when one is repeated."""
        with contextlib.suppress(OSError):
            lines = (self.run_path / "metrics.jsonl").read_bytes().count(b"\n")
            self.epochs += [time.monotonic()] * (lines - len(self.epochs))

    def _await(
        self,
        process: LabProcess,
        done: Callable[[], bool],
        seconds: float,
        what: str,
        *,
        may_end: bool = False,
    ) -> None:
        end = time.monotonic() + seconds
        while process.poll() is None:
            self._look()
            if done():
                return
            if time.monotonic() > end:
                raise TimeoutError(f"{seconds:.0f} s were not enough until {what}")
            time.sleep(LOOK_SECONDS)
        if not may_end:
            raise TimeoutError(f"it ended before {what}")

    def judge(self, lab: Lab, outcome: Outcome, expected: Mapping[str, Any]) -> None:
        """Say of a cell that has ended what came of it."""
        text = self.log.read_text(errors="replace")
        outcome.repeated = sum(int(number) for number in _REPEATED.findall(text))
        outcome.repeated += text.count("; training goes on with ")
        if outcome.code == 0 and outcome.is_hit:
            gaps = [b - a for a, b in itertools.pairwise(self.epochs)]
            usual = statistics.median(gaps[: max(1, self.before - 1)])
            after = [self.broken_at, *(t for t in self.epochs if t > self.broken_at)]
            waits = [b - a for a, b in itertools.pairwise(after)]
            outcome.seconds = max(0.0, max(waits, default=0.0) - usual)
            if self.how.exact:
                outcome.equal = are_equal(self.run_path, expected)
        lines = [line for line in text.splitlines() if line.strip()]
        told = [line for line in lines if "host " in line and " in " in line]
        outcome.note = outcome.note or (told or lines or [""])[-1][:200]
        outcome.orphans = tuple(self._orphans(lab))
        outcome.left = tuple(self.left(lab))

    def _orphans(self, lab: Lab) -> list[str]:
        end = time.monotonic() + TIDY_SECONDS
        while (found := self.running(lab)) and time.monotonic() < end:
            time.sleep(0.5)
        return found

    def running(self, lab: Lab) -> list[str]:
        """Processes of the training on its hosts."""
        found = []
        for host in HOSTS:
            commands = _asked(lab, host, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
            found += [f"{word} on {host}" for word in _OURS if word in commands]
        return found

    def left(self, lab: Lab) -> list[str]:
        """Files that do not belong to a run that has ended."""
        names = (".launch", "join.json")
        found = [name for name in names if (self.run_path / name).exists()]
        found += [path.name for path in self.run_path.glob("checkpoints/.partial-*")]
        for host in HOSTS:
            shared = _asked(lab, host, "ls /dev/shm").split()
            found += [f"/dev/shm/{name} on {host}" for name in shared if _SHARED.search(name)]
        return found


def _asked(lab: Lab, host: str, script: str) -> str:
    """What a shell on a host prints; nothing where the host is gone."""
    try:
        done = lab.run(["sh", "-c", script], on=host, capture_output=True, timeout=30)
    except PacelineError:
        return ""
    return str(done.stdout.decode(errors="replace"))
