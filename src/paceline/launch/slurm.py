"""`slurm`: a script for sbatch, followed to its end; inside an allocation, srun."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from paceline.config.environment import Allocation, slurm_allocation
from paceline.errors import UserError, WorkerError, shown
from paceline.launch.engines import Command, Engine, Launch, Running, StartedProcesses, tail

SCRIPT = "job.sh"
_PATIENCE = 30.0
"""How long a job may be unknown to Slurm's queue after it was submitted, or after it ended."""

_SOON = 5.0
"""Seconds after which a job that waits without a reason is spoken of."""


class SlurmEngine(Engine):
    """Slurm decides which host a node is on."""

    name = "slurm"
    places_nodes = True

    def __init__(
        self, options: tuple[str, ...] = (), *, allocation: Allocation | None = None
    ) -> None:
        self.options = options
        self.allocation = allocation or slurm_allocation()

    def command_lines(self, launch: Launch) -> list[Command]:
        nodes = len(launch.places)
        # One task per node: Slurm would fill the first node before it takes a second one.
        apart = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        if self.allocation is not None and nodes > len(self.allocation.hosts):
            apart = [f"--ntasks={nodes}"]
        # What is left of the others after a loss is not Slurm's to decide, but the launcher's.
        srun = ["srun", *apart, "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
        srun.append("--cpu-bind=none")  # agents that share a host divide its cores themselves
        if self.allocation is not None:
            words = [*srun, *self.options, *launch.agent()]
            return [Command(label="srun", words=words, variables=launch.variables)]
        lines = ["#!/bin/sh", f"#SBATCH --job-name={_plain(launch.name)}"]
        lines += [f"#SBATCH {word}" for word in (*apart, "--no-kill", "--no-requeue")]
        lines += [f"#SBATCH --output={launch.run}/slurm-%j.out"]
        lines += [f"#SBATCH {option}" for option in self.options]
        last = f"exec {shlex.join([*srun, *launch.agent()])}\n"
        # What Slurm gets, and keeps to itself, has a line more than what lies in the run directory.
        exported = "".join(f"export {name}={value}\n" for name, value in launch.variables.items())
        text = "\n".join([*lines, "", ""])
        return [
            Command(
                label="sbatch",
                words=["sbatch", "--parsable"],
                files={SCRIPT: text + last},
                told=text + exported + last,
            )
        ]

    def start(self, launch: Launch) -> Running:
        commands = self.command_lines(launch)
        return (
            StartedProcesses(commands, launch.run)
            if self.allocation is not None
            else SlurmJob(commands[0], launch.run)
        )


class SlurmJob(Running):
    """A submitted job."""

    def __init__(self, command: Command, run: Path) -> None:
        for name, text in command.files.items():
            (run / name).write_text(text)
        done = _slurm(command.words, command.told)
        if done.returncode != 0:
            words = " ".join((done.stderr or done.stdout).split())
            raise UserError(
                f"sbatch refused the job: {words}; options for it go to --slurm, as"
                ' --slurm "--partition=short --time=60"'
            )
        self.number = job_number(done.stdout)
        self._log = run / f"slurm-{self.number}.out"
        self._state, self._reason, self._asked = "PENDING", "", 0.0
        self._submitted = time.monotonic()

    def state(self) -> str:
        """What the queue says; "" when it does not know the job any more."""
        now = time.monotonic()
        if now - self._asked >= 0.5 and self._state:
            self._asked = now
            done = _slurm(["squeue", "--noheader", "--format=%T %r", "--jobs", self.number])
            if done.returncode == 0 or "Invalid job id" in done.stderr:
                self._state, self._reason = job_state(done.stdout)
        return self._state

    def has_begun(self) -> bool:
        return self.state() not in ("PENDING", "CONFIGURING")

    def waits_for(self) -> str:
        if self.has_begun():
            return ""
        if self._reason in ("", "None"):  # most often it is just about to begin
            waited = time.monotonic() - self._submitted
            return f"Slurm's job {self.number} is queued" if waited > _SOON else ""
        return f"Slurm's job {self.number} is queued ({self._reason})"

    def failure(self) -> str | None:
        state = self.state()
        if state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            return None
        words = tail(self._log)
        return f"Slurm's job {self.number} ended ({state or 'it has left the queue'}): {words}"

    def has_ended(self) -> bool:
        return self.state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

    def last_words(self) -> str:
        return tail(self._log)

    def end(self) -> None:
        if not self.has_ended():
            _slurm(["scancel", self.number])
            deadline = time.monotonic() + 5.0
            while time.monotonic() < deadline and not self.has_ended():
                time.sleep(0.1)


def job_number(printed: str) -> str:
    """Of what `sbatch --parsable` prints; what a site's own wrapper prints may stand before it.

    >>> job_number("loading modules\\n4711;cluster\\n")
    '4711'
    """
    last = printed.strip().rpartition("\n")[2]
    number = last.partition(";")[0]
    if re.fullmatch(r"[0-9]{1,18}", number) is None:
        raise UserError(
            f"sbatch --parsable ended with {shown(last)}, which is no job's number: let what wraps"
            " sbatch here print only before it"
        )
    return number


def job_state(printed: str) -> tuple[str, str]:
    """Of what `squeue --format="%T %r"` prints: state and reason; "" for what is not there.

    >>> job_state("PENDING Resources\\n")
    ('PENDING', 'Resources')
    """
    found = re.match(r"\s*([A-Z][A-Z_]{0,40})\b[ \t]*([\w:,.-]{0,200})", printed)
    return (found[1], found[2]) if found else ("", "")


def _slurm(words: list[str], told: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, input=told, capture_output=True, text=True, errors="replace", timeout=_PATIENCE
        )
    except OSError as error:
        raise UserError(
            f"{words[0]} cannot be started ({error.strerror}): engine 'slurm' needs Slurm's"
            " commands on this machine"
        ) from None
    except subprocess.TimeoutExpired:
        raise WorkerError(
            f"{words[0]} has not answered for {_PATIENCE:.0f} s: is slurmctld up?"
        ) from None


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name) or Path(sys.argv[0]).name
