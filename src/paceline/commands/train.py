"""`paceline train`."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.config.help import settings_help
from paceline.errors import ConfigError, DivergedError, RunError, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.api import HostsRequest
    from paceline.schema.legs import Leg

OF_ENGINE = {"--address": "ray", "--master": "spark"}
"""Options that say where a cluster is, and the engine of each."""


class TrainCommand(click.Command):
    """Appends every setting, with its docstring, to the help."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, rows in settings_help():
            with formatter.section(f"Settings: {section}"):
                formatter.write_dl(rows)


@click.command("train", cls=TrainCommand)
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a setting.")
@click.option("--data", "data_root", type=click.Path(path_type=Path), help="Folder of data sets.")
@click.option("--run", type=click.Path(path_type=Path), help="Run directory to make or continue.")
@click.option("--resume", is_flag=True, help="Continue the run of --run or CONFIG, or the latest.")
@click.option("--plan", type=click.Path(path_type=Path), help="Run exactly this plan.json.")
@click.option("--again", is_flag=True, help="Forget what past trainings have found to be fast.")
@click.option(
    "--hosts",
    "hosts_text",
    metavar="HOSTS",
    help="Where to train: a hosts.toml, names as a,b, or `lab`; this machine without it.",
)
@click.option(
    "--engine",
    metavar="NAME",
    help="Who starts the hosts: mpi, torchrun (torchrun:c10d), ssh, slurm, ray, spark, local; or"
    " auto.",
)
@click.option(
    "--nodes", type=click.IntRange(min=1), help="For slurm, ray, spark: how many nodes to ask for."
)
@click.option(
    "--address", metavar="ADDRESS", help="Of the Ray cluster; auto: the one of this host."
)
@click.option("--master", metavar="URL", help="Of the Spark cluster, as spark://host:7077.")
@click.option("--slurm", "slurm_text", default="", metavar="OPTIONS", help="For sbatch or srun.")
@click.option(
    "--publish", type=click.Path(path_type=Path), help="Export every new best, as to models/NAME."
)
@click.option("--watch", is_flag=True, help="A live page beside the training (`paceline watch`).")
@click.option("-v", "--verbose", is_flag=True, help="Tell of every leg and why it was made.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, and only that.")
@click.pass_context
def command(
    context: click.Context,
    config: Path | None,
    changes: tuple[str, ...],
    data_root: Path | None,
    run: Path | None,
    resume: bool,
    plan: Path | None,
    again: bool,
    hosts_text: str | None,
    engine: str | None,
    nodes: int | None,
    address: str | None,
    master: str | None,
    slurm_text: str,
    publish: Path | None,
    watch: bool,
    verbose: bool,
    as_json: bool,
) -> int:
    """Train a model. CONFIG is a TOML file or a run directory; the embedded default without it.

    \b
    paceline train
    paceline train examples/mnist.toml --set workload.batch_size=1024
    paceline train runs/latest/config.toml     the same run once more, bit for bit
    paceline train --resume                    go on where the latest run stopped
    paceline train --resume --set train.epochs=20      ... and for longer
    paceline train my.toml --hosts a,b         on two machines
    paceline train my.toml --publish models/digits     for `paceline serve models/`
    paceline train my.toml --engine slurm --nodes 4
    paceline train my.toml --engine ray --address auto
    paceline train my.toml --engine spark --master spark://host:7077
    """
    from paceline import api
    from paceline.commands.export import check, publishing
    from paceline.commands.watch import watching
    from paceline.config import load_config
    from paceline.config.environment import started_by
    from paceline.schema.requests import with_settings

    if publish is not None:
        check(publish)
    if resume and run is None and config is not None:
        run = api.run_of(config)
    started = started_by()
    by_hand = started is not None and started.size > 1 and hosts_text is None and engine is None
    cluster = {"--address": address, "--master": master}
    hosts = None if by_hand else hosts_request(hosts_text, engine, nodes, slurm_text, cluster)
    if data_root is not None:
        changes = (*changes, f"data.root={json.dumps(str(data_root))}")

    options = {"--hosts": hosts_text, "--engine": engine, "--nodes": nodes, "--slurm": slurm_text}
    options |= cluster
    where = [str(word) for pair in options.items() if pair[1] for word in pair]

    def say(text: str) -> None:
        if not as_json:
            click.echo(text)

    def begin(changed: api.Result | None = None) -> api.TrainingStart:
        """The training; `changed`: one that was stopped to go on with other settings."""
        asked = load_config(config, changes) if config or not resume else None
        if changed is not None:
            asked = load_config(changed.run)
            asked = replace(asked, train=with_settings(asked.train, changed.changes))
        script: list[Leg] = []
        settings, directory, chosen = api.begin(
            asked,
            run=run if changed is None else changed.run,
            resume=resume or changed is not None,
            plan=plan,
            changes=changes,
            elsewhere=hosts is not None,
            say=say,
        )
        if chosen is None and config is not None and not again and changed is None:
            chosen = api.plan_beside(config, settings)
            script = api.legs_beside(config) if chosen is not None else []
        return api.TrainingStart(
            config=settings,
            run=directory,
            plan=None if script else chosen,
            fixed=plan is not None,
            script=script,
            verbose=verbose,
            began=seconds_since_start(),
            silent=as_json,
            again=again,
            say=say,
            show=(lambda text: click.echo(text, err=True)) if as_json else click.echo,
            hosts=hosts,
            changeable=not by_hand,
        )

    def go_on(stopped: api.Result) -> api.TrainingStart:
        """With the changes that were asked for, or as before where they are refused."""
        try:
            return begin(stopped)
        except UserError as error:
            say(f"warning: {error}; going on as before")
            return begin(replace(stopped, changes={}))

    if by_hand:
        if publish is not None:
            raise ConfigError(
                "--publish watches a run from the command that starts it: publish a training that"
                " mpiexec or torchrun started with `paceline export`"
            )
        assert started is not None
        from paceline.commands.by_hand import train_by_hand

        found = train_by_hand(started, begin)
        if found is None:
            return 0
        result = found
    else:
        start = begin()
        with publishing(start.run.path, publish, say), watching(start.run.path, watch, say):
            try:
                result = api.run_training(start)
                while result.changes:
                    result = api.run_training(go_on(result))
            except RunError as error:
                saved = (start.run.checkpoints / "latest").exists()
                if saved and not isinstance(error, DivergedError):
                    say(_continue_with(start.run.path, where))
                raise
    _show(result, as_json, where)
    return result.exit_code


def _continue_with(run: Path, where: Sequence[str]) -> str:
    """The command that goes on with a run; `where`: the options that say on which hosts."""
    words = ["paceline", "train", "--resume", "--run", str(run), *where]
    return f"continue with: {shlex.join(words)}"


def seconds_since_start() -> float:
    """When this process began, as perf_counter counts: what its imports took is part of it."""
    from paceline.observe.samples import process_began

    return time.perf_counter() - (time.time() - process_began())


def hosts_request(
    hosts: str | None,
    engine: str | None,
    nodes: int | None = None,
    slurm: str = "",
    cluster: Mapping[str, str | None] | None = None,
) -> HostsRequest | None:
    """What the options say about other machines; None: this one alone."""
    from paceline.api import HostsRequest
    from paceline.config.environment import slurm_allocation
    from paceline.config.hosts import find_hosts, numbered_hosts
    from paceline.launch.engines import LOCAL, engine_class, finds_hosts

    name = (engine or "auto").partition(":")[0]
    if name not in (LOCAL, "auto"):
        engine_class(name)
    if name == LOCAL and hosts is not None:
        raise ConfigError(f"--engine local is this machine alone: leave --hosts {hosts} out")
    options = cluster or {}
    for option, owner in OF_ENGINE.items():
        if options.get(option) is not None and name != owner:
            raise ConfigError(f"{option} belongs to --engine {owner}: leave it out")
    if finds_hosts(name):
        from paceline.workflow.clusters import cluster_request

        if slurm:
            raise ConfigError(f"--slurm belongs to --engine slurm: leave it out with {name}")
        address = next(filter(None, options.values()), None)
        return cluster_request(name, hosts=hosts, nodes=nodes, address=address)
    allocation = slurm_allocation()
    inside = allocation is not None and hosts is None and name in ("auto", "slurm")
    if name == LOCAL or (hosts is None and not inside and name == "auto"):
        return None
    if name == "slurm" or inside:
        if hosts is not None:
            raise ConfigError(
                "Slurm itself chooses the hosts: leave --hosts out, and ask for named ones with"
                f' --slurm "--nodelist={hosts}"'
            )
        count = nodes or (allocation.tasks if allocation else None)
        if count is None:
            raise ConfigError("--engine slurm must know how many: add --nodes N")
        words = tuple(shlex.split(slurm))
        return HostsRequest(hosts=numbered_hosts(count), engine="slurm", options=words)
    if nodes is not None or slurm:
        raise ConfigError("--nodes and --slurm belong to --engine slurm: leave them out")
    if hosts is None:
        raise ConfigError(f"--engine {engine} needs --hosts: a hosts.toml, names as a,b, or lab")
    return HostsRequest(hosts=find_hosts(hosts), engine=engine or "auto")


def _show(result: Any, as_json: bool, where: Sequence[str]) -> None:
    """`where`: the options that say where it was trained."""
    if as_json:
        click.echo(json.dumps({"run": str(result.run), **result.summary}, indent=2))
        return
    if result.exit_code:
        click.echo(f"stopped and saved; {_continue_with(result.run, where)}")
        return
    from paceline.text import terminal
    from paceline.training.progress import summary_table

    console = terminal()
    console.print(summary_table(result.summary))
    console.print(f"run directory: {result.run}", highlight=False, soft_wrap=True)
