"""The chain of `paceline run`: find the script, check the hosts, run the ranks, tell the run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.environment import named_variables, passed_variables
from paceline.errors import UserError, shown
from paceline.launch.checks import free_port
from paceline.launch.scripts import sources
from paceline.launch.scripts.counting import auto_ranks, rank_cores, this_machine
from paceline.launch.scripts.screen import Screen
from paceline.launch.scripts.supervision import EXIT, RanksOutcome, Supervisor
from paceline.run import RunDirectory, create_run
from paceline.schema import RankContext, encode, read_json, write_json
from paceline.schema.hosts import Hosts
from paceline.schema.script import RankExit, Script, script_text
from paceline.secure.sealing import new_secret
from paceline.signals import handled
from paceline.text import duration, user_path

RUNS = Path("runs/scripts")
"""Apart from trainings, whose newest run `train --resume` continues."""


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """What `paceline run` was asked for."""

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    hosts: Hosts | None = None
    """None: this machine alone."""
    ranks: int | None = None
    """Of every host; None: as many as make sense there."""
    stall_seconds: float = 60.0
    variables: tuple[str, ...] = ()
    """NAME or NAME=VALUE each."""
    run: Path | None = None
    say: Callable[[str], None] = print
    show: Callable[[str, bool], None] = field(default=lambda text, is_error: print(text))


def run_script(asked: ScriptRequest) -> int:
    """Run a script to its end; the exit code of the rank that failed first, or 0."""
    script = find_script(asked)
    if asked.hosts is not None and asked.hosts.workers != asked.hosts.host:
        raise UserError('a script has no servers: leave hosts with role = "server" out of --hosts')
    work = _on_hosts(asked, script) if asked.hosts is not None else _here
    run = create_run(Path(script.target).stem, asked.run, RUNS)
    run.lock()
    screen = Screen(asked.show)
    started = time.time()
    outcome: RanksOutcome | None = None
    try:
        with run.explained():
            outcome = work(asked, script, run, screen)
        return _tell(asked, run, outcome, screen)
    except UserError:
        run.discard()
        raise
    finally:
        if run.path.is_dir():
            _summarize(run, outcome, screen, started)
        run.unlock()


def find_script(asked: ScriptRequest) -> Script:
    """The script as every host is to run it; refused where there is none."""
    for word in (asked.target, *asked.arguments):
        if any("\ud800" <= each <= "\udfff" for each in word):
            raise UserError(f"{shown(word)} is not UTF-8, which a run's config.toml needs")
    if asked.is_module:
        file: Path | None = sources.module_file(asked.target, Path.cwd())
        target, root = asked.target, Path.cwd()
    else:
        # Not resolved: a script that is a link finds its modules beside the link's target, as
        # Python has it, and its name in sys.argv as it was given.
        file = user_path(asked.target)
        if not file.is_file():
            what = "a folder" if file.is_dir() else "no file"
            raise UserError(
                f"{shown(asked.target)} is {what}: name the script that torchrun would be given,"
                " or a module after -m"
            )
        target, root = str(file.absolute()), file.resolve().parent
        file = file.resolve()
    return Script(
        target=target,
        is_module=asked.is_module,
        arguments=asked.arguments,
        folder=str(Path.cwd()),
        variables=named_variables(asked.variables),
        stall_seconds=asked.stall_seconds,
        sources=sources.hashes(file, root) if file is not None else {},
    )


Work = Callable[[ScriptRequest, Script, RunDirectory, Screen], RanksOutcome]


def _here(asked: ScriptRequest, script: Script, run: RunDirectory, screen: Screen) -> RanksOutcome:
    """All ranks on this machine, under this process."""
    script = dataclasses.replace(script, interfaces=("lo",))
    run.config.write_text(script_text(run.path.name, script))
    ranks = asked.ranks or auto_ranks(this_machine())
    context = RankContext(world_size=ranks, local_size=ranks, port=free_port(), secret=new_secret())
    chosen = script.variables.get("OMP_NUM_THREADS")
    threads = f"OMP_NUM_THREADS={chosen}" if chosen else _count(rank_cores(ranks, 0)[1], "thread")
    asked.say(f"{_count(ranks, 'rank')} here, {threads} each")
    supervisor = Supervisor(script, run, context, memory=screen, say=asked.say, takes_input=True)
    with handled(supervisor.note_signal):
        return supervisor.watch()


def _on_hosts(asked: ScriptRequest, script: Script) -> Work:
    """Checks the hosts now, before anything is made; what runs the script there."""
    from paceline.launch.scripts import on_hosts

    hosts = asked.hosts
    assert hosts is not None
    found = on_hosts.check_hosts(hosts, script, passed_variables())
    for warning in found.warnings():
        asked.say(f"warning: {warning}")
    plan = on_hosts.plan_ranks(hosts, found, asked.ranks)
    whole = dataclasses.replace(
        script,
        interfaces=on_hosts.interfaces(hosts, found),
        variables=on_hosts.share_variables(hosts, plan) | script.variables,
    )

    def work(
        asked: ScriptRequest, script: Script, run: RunDirectory, screen: Screen
    ) -> RanksOutcome:
        run.config.write_text(script_text(run.path.name, whole))
        told = ", ".join(f"{node.ranks} on {node.host}" for node in plan.nodes)
        asked.say(f"{_count(sum(node.ranks for node in plan.nodes), 'rank')}: {told}")
        return on_hosts.run_on_hosts(whole, run, hosts, plan, screen, asked.say)

    return work


def _tell(asked: ScriptRequest, run: RunDirectory, outcome: RanksOutcome, screen: Screen) -> int:
    """Say how it ended; the exit code."""
    exits = exits_in(run)
    if outcome.signalled is not None:
        asked.say(f"stopped; what the ranks printed is in {run.path}")
        return 128 + outcome.signalled
    if not outcome.failed:
        seconds = max((end.seconds for end in exits), default=0.0)
        asked.say(f"{_count(len(exits), 'rank')} ended well after {duration(seconds)}; {run.path}")
        return 0
    first = screen.first(outcome.failed)
    for sentence in screen.report(first, exits):
        asked.say(sentence)
    asked.say(f"all that the ranks printed is in {run.path}")
    return first.exit_code


def exits_in(run: RunDirectory) -> list[RankExit]:
    """How the ranks of a run ended, as far as they have."""
    found = [read_json(RankExit, path) for path in run.path.glob(f"rank-*/{EXIT}")]
    return sorted(found, key=lambda end: end.rank)


def _summarize(
    run: RunDirectory, outcome: RanksOutcome | None, screen: Screen, started: float
) -> None:
    """Write run.json; the logs are there already."""
    exits = exits_in(run)
    summary: dict[str, Any] = {
        "finished": outcome is not None and not outcome.failed and outcome.signalled is None,
        "started": started,
        "seconds": round(time.time() - started, 3),
        "signal": outcome.signalled if outcome is not None else None,
        "ranks": [encode(end) for end in exits],
    }
    if outcome is not None and outcome.failed and outcome.signalled is None:
        first = screen.first(outcome.failed)
        lines = screen.last_lines(first.rank)
        summary["first_failure"] = {"rank": first.rank, "how": first.how, "last_lines": lines}
    write_json(run.summary, summary)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
