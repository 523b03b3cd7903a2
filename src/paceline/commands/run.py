"""`paceline run`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(
    "run",
    # Whatever follows the script belongs to it, even what looks like an option of ours.
    context_settings={"allow_interspersed_args": False},
)
@click.option("--hosts", metavar="HOSTS", help="A hosts.toml, names as a,b:4 (4 ranks), or `lab`.")
@click.option(
    "--nproc",
    default="auto",
    metavar="auto|N",
    help="Ranks of every host. auto: one per CUDA device; else one per physical core up to four"
    " cores, beyond that one per four cores and at least four.",
)
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module's name.")
@click.option(
    "--stall",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0.0),
    metavar="SECONDS",
    help="Name a rank that prints nothing and uses no CPU for so long; 0: never.",
)
@click.option(
    "--env",
    "variables",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="A variable for the ranks; with --hosts those here do not travel by themselves.",
)
@click.option("--run", type=click.Path(path_type=Path), help="Folder for the logs, to be made.")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def command(
    hosts: str | None,
    nproc: str,
    is_module: bool,
    stall: float,
    variables: tuple[str, ...],
    run: Path | None,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Start any script of torch.distributed, unchanged, with the environment that torchrun gives.

    \b
    paceline run train.py --epochs 3           everything after train.py is its own
    paceline run --nproc 2 -m my.training
    paceline run --hosts a,b train.py          on two machines, from one command

    Each rank is pinned to cores of its own and has as many threads (unless OMP_NUM_THREADS is
    set). The first failure is shown first, and the exit code is that rank's (128 + N for one
    that signal N killed). What each rank printed, its exit code and its seconds stay in
    runs/scripts/. With --hosts the script must lie at the same path on every host; that is checked.
    """
    from paceline.config.hosts import find_hosts
    from paceline.launch.scripts.counting import asked_ranks
    from paceline.workflow.scripts import ScriptRequest, run_script

    return run_script(
        ScriptRequest(
            target=script,
            is_module=is_module,
            arguments=arguments,
            hosts=find_hosts(hosts) if hosts is not None else None,
            ranks=asked_ranks(nproc),
            stall_seconds=stall,
            variables=variables,
            run=run,
            say=lambda text: click.echo(f"paceline: {text}", err=True),
            show=lambda text, is_error: click.echo(text, err=is_error),
        )
    )
