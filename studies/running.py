"""Runs the steps of an experiment by the public commands, each in a process of its own.

A step's folder, OUT/steps/NAME, has what it was given (config.toml, lab.toml, command.txt), what it
said (output.txt), what it left (run/ or result.json) and, once it has ended, step.json. A step
whose step.json fits its definition is not run again; a training that was cut off goes on from its
last checkpoint, unless it was in a lab. So an experiment can be ended in any way at any time and
be started again.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import string
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import tomli_w

from paceline.config import config_from
from paceline.config.environment import child_environment
from paceline.data import names as data_names
from paceline.errors import ConfigError, DataError
from paceline.lab.spec import LabSpec
from paceline.schema import write_json
from paceline.schema.plain import parse_json
from studies.outcome import StepOutcome, load_outcome, read_object
from studies.peers.environments import find_peer
from studies.peers.recipes import names as peer_names
from studies.process import execute, locked, step_lock
from studies.spec import Experiment, StudyStep, at_hand

PEERS = ("benchmarks", "peers")
PACELINE = (sys.executable, "-m", "paceline")


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step with the places that its command names."""

    step: StudyStep
    out: Path

    @property
    def folder(self) -> Path:
        return self.out / "steps" / self.step.name

    @property
    def config(self) -> Path:
        return self.folder / "config.toml"

    @property
    def lab(self) -> Path:
        return self.folder / "lab.toml"

    @property
    def traffic(self) -> Path:
        return self.folder / "lab.json"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"

    @property
    def printed(self) -> Path:
        """What a command wrote to its standard output, apart from what else it said."""
        return self.folder / "printed.txt"

    @property
    def record(self) -> Path:
        return self.folder / "step.json"

    @property
    def begun(self) -> Path:
        return self.folder / "begun.json"


def check(experiment: Experiment) -> None:
    """Refuse what cannot work before anything is run: settings, hosts, programs."""
    for step in experiment.steps:
        try:
            config_from({"name": step.name, **step.settings})
            if step.hosts:
                LabSpec.from_tables(lab_tables(step))
        except ConfigError as error:
            raise ConfigError(f"step {step.name!r} of {experiment.name}: {error}") from None


def check_data(steps: Sequence[StudyStep]) -> None:
    """Refuse to begin where a data set that comes by a name is not here: every step would fail."""
    for step in steps:
        name = str(step.settings.get("workload.data", ""))
        if name in data_names() and not at_hand(name, step.settings):
            raise DataError(
                f"step {step.name!r} needs the data set {name!r}, which is not here: get it with"
                f" `paceline data get {name}`, or point PACELINE_DATA to the folder that holds it"
            )


def run_steps(
    steps: Sequence[StudyStep],
    out: Path,
    *,
    again: bool = False,
    say: Callable[[str], None] = print,
    show: Callable[[str], None] = lambda text: None,
) -> list[StepOutcome]:
    """Run those that have not been run, one after another; a failed one does not stop the rest.

    `show` gets what the running step said last, about once a second.
    """
    outcomes = []
    with locked(out):
        for number, step in enumerate(steps, start=1):
            work = Work(step=step, out=out)
            before = load_outcome(step, work.folder)
            head = f"[{number}/{len(steps)}] {step.name}"
            if before.done and not again:
                say(f"{head}: done before, {before.seconds:.0f} s")
                outcomes.append(before)
                continue
            say(f"{head}: {shown(command_of(work))}")
            outcome = run_step(work, again=again, show=show)
            show("")
            say(f"    {outcome.failed or 'done'}, {outcome.seconds:.0f} s")
            outcomes.append(outcome)
    return outcomes


def run_step(
    work: Work, *, again: bool = False, show: Callable[[str], None] = lambda text: None
) -> StepOutcome:
    """Run one step to its end and write down how it went."""
    step = work.step
    work.folder.mkdir(parents=True, exist_ok=True)
    with step_lock(work.folder) as lock:
        resuming = not again and can_resume(work)
        if not resuming:
            _clear(work)
        prepare(work)
        command = command_of(work, resuming=resuming)
        work.folder.joinpath("command.txt").write_text(shown(command) + "\n")
        write_json(work.begun, {"fingerprint": step.fingerprint, "resumed": resuming})
        start = time.monotonic()
        code = execute(
            command,
            output=work.output,
            printed=work.printed if step.kind == "command" else None,
            keep=lock,
            limit=step.limit,
            environment=_environment(step),
            tick=lambda: show(last_line(work.output)),
        )
        seconds = time.monotonic() - start
        if step.kind == "command":
            _keep_printed(work)
        traffic = read_object(work.traffic)
        record: dict[str, Any] = {
            "fingerprint": step.fingerprint,
            "seconds": round(seconds, 3),
            "exit_code": code,
            "failed": why_failed(work, code, seconds),
            "said": last_line(work.output),
            "resumed": resuming,
            "when": datetime.now().strftime("%Y-%m-%d %H:%M"),
            "machine": machine_words(),
            "hosts": traffic.get("hosts", {}),
            "faults": traffic.get("faults", []),
        }
        write_json(work.record, record)
    return load_outcome(step, work.folder)


def can_resume(work: Work) -> bool:
    """Whether a training was cut off after its first checkpoint, and is still the same one.

    One on lab hosts is there to be timed: it starts anew, since its second half alone, with the
    start-up before it, would not be what was asked for.
    """
    same = read_object(work.begun).get("fingerprint") == work.step.fingerprint
    ended = work.record.exists()
    saved = (work.run / "checkpoints" / "latest").exists()
    return work.step.kind == "train" and same and saved and not ended and not work.step.hosts


def command_of(work: Work, *, resuming: bool = False) -> list[str]:
    """The command line of a step."""
    step = work.step
    if step.kind == "train":
        command = [*PACELINE, "train", str(work.config), "--run", str(work.run)]
        command += ["--hosts", "lab"] if step.hosts else []
        command += ["--engine", step.engine] if step.engine else []
        command += ["--resume"] if resuming else []
    elif step.kind == "peer":
        command = [peer_python(step.peer), "-m", f"{'.'.join(PEERS)}.{step.peer}"]
        command += [str(work.config), "--result", str(work.result)]
        command += ["--processes", str(step.processes)] if step.processes else []
        command += ["--threads", str(step.threads)] if step.threads else []
        command += ["--variant", step.variant] if step.variant else []
    else:
        places = {"{config}": work.config, "{step}": work.folder, "{out}": work.out}
        command = list(step.command)
        for name, path in places.items():
            command = [word.replace(name, str(path)) for word in command]
        if command[0] == "paceline":
            command[:1] = PACELINE
    if step.hosts:
        lab = [*PACELINE, "lab", "run", str(work.lab), "--report", str(work.traffic), "--"]
        command = [*lab, *command]
    return command


def peer_root(name: str) -> Path | None:
    """Where the peer's file is: Paceline's source tree, or the current directory; None: nowhere."""
    for root in (Path(__file__).resolve().parents[1], Path.cwd()):
        if root.joinpath(*PEERS, f"{name}.py").is_file():
            return root
    return None


def peer_python(name: str) -> str:
    """The Python of a peer's own environment; ours where it has none, or it is not installed."""
    if name in peer_names() and (peer := find_peer(name)).installed:
        return str(peer.python)
    return sys.executable


def shown(command: Sequence[str]) -> str:
    """A command line as a person would type it."""
    text = shlex.join(command)
    return text.replace(shlex.join(PACELINE), "paceline").replace(sys.executable, "python")


def lab_tables(step: StudyStep) -> dict[str, Any]:
    """The lab that a step's hosts mean; they are called a, b, c and so on."""
    hosts = []
    for name, asked in zip(_host_names(len(step.hosts)), step.hosts, strict=True):
        host = {"cores": asked} if isinstance(asked, float) else dict(asked)
        visible = {} if step.visible is None else {"visible": step.visible}
        hosts.append({"name": name, "slots": step.slots, **visible, **host})
    link = {"rate": step.rate, "delay": step.delay}
    tables: dict[str, Any] = {"link": {key: value for key, value in link.items() if value}}
    tables["host"] = hosts
    if step.faults:
        tables["fault"] = [dict(fault) for fault in step.faults]
    return tables


def _host_names(count: int) -> list[str]:
    letters = string.ascii_lowercase
    return [letters[i] if i < len(letters) else f"host-{i}" for i in range(count)]


def prepare(work: Work) -> None:
    """Write what the command reads."""
    tables: dict[str, Any] = {"name": work.step.name}
    for key, value in work.step.settings.items():
        *parents, last = key.split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = value
    work.config.write_text(tomli_w.dumps(tables))
    if work.step.hosts:
        work.lab.write_text(tomli_w.dumps(lab_tables(work.step)))


def _clear(work: Work) -> None:
    """Take away what an earlier try left."""
    for path in work.folder.iterdir():
        if path.name == ".lock":
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _keep_printed(work: Work) -> None:
    """The JSON that a command printed, apart from what else it said."""
    text = work.printed.read_text(errors="replace")
    starts = [0, *(place + 1 for place, letter in enumerate(text) if letter == "\n")]
    for start in starts:
        if text[start : start + 1] in ("{", "["):
            with contextlib.suppress(ValueError):
                found = parse_json(text[start:])
                write_json(work.result, found if isinstance(found, dict) else {"rows": found})
                return


def why_failed(work: Work, code: int, seconds: float) -> str:
    """One sentence, or nothing for a step that ended as it should."""
    step = work.step
    if step.limit and seconds >= step.limit:
        return f"ended after {step.limit:.0f} s, its limit"
    if step.fails:
        return "" if code else "it was expected to end with an error, but did not"
    if code and step.kind == "peer" and peer_root(step.peer) is None:
        return f"{'/'.join(PEERS)}/{step.peer}.py is not there: it is what trains the peer"
    if code:
        return last_line(work.output) or f"ended with exit code {code}"
    if step.kind != "train" and not work.result.exists():
        return "it left no result" if step.kind == "peer" else "it printed no JSON"
    return ""


def last_line(path: Path) -> str:
    """What a program said last; Paceline's own word for a failure before the traceback after it.

    What the lab says about itself is left out.
    """
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    # Rules of dashes, such as torchrun's last line, say nothing.
    words = [line.strip() for line in lines if any(map(str.isalnum, line))]
    said = [line for line in words if not line.startswith("lab: ")]
    failures = [line.removeprefix("paceline: ") for line in said if line.startswith("paceline: ")]
    if not failures:
        return said[-1] if said else ""
    return f"{failures[-1]} {said[-1]}" if failures[-1].endswith(":") else failures[-1]


def machine_words() -> str:
    """What this machine is, for the table that says where figures come from."""
    cores = len(os.sched_getaffinity(0))
    name = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else ""
    versions = f"Python {platform.python_version()}, PyTorch {metadata.version('torch')}"
    words = [f"{cores} cores", name, f"{platform.system()} {platform.release()}", versions]
    return ", ".join(word for word in words if word)


def _environment(step: StudyStep) -> dict[str, str] | None:
    """Ours; a peer's module is found in the source tree."""
    if step.kind != "peer":
        return None
    root = peer_root(step.peer)
    if root is None:
        return None
    # Environments of peers have what Paceline needs, and Paceline itself from where it is here.
    paths = [str(root), str(root / "src"), child_environment({}).get("PYTHONPATH", "")]
    return child_environment({"PYTHONPATH": os.pathsep.join(path for path in paths if path)})
