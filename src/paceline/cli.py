"""The `paceline` command: one subcommand per thing a person wants.

Subcommands live in `paceline.commands`, one file each, and are imported only
when they are used, so that `paceline --help` answers at once (torch alone takes
more than a second to import).
"""

from __future__ import annotations

import errno
import importlib
import itertools
import sys
from typing import NoReturn

import click

from paceline.errors import PacelineError, UserError, is_out_of_memory, shortened, shown
from paceline.schema.registry import Registry
from paceline.text import printable

_NAMES_OF_NO_FILE = (errno.ENAMETOOLONG, errno.ELOOP)
"""Wherever a path was given, the user can put it right."""

# name -> (module with a click command called `command`, one line for --help)
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("paceline.commands.init", "Write a first file that trains what is in a folder."),
    "train": ("paceline.commands.train", "Train a model; with no argument, the embedded default."),
    "run": ("paceline.commands.run", "Start any torch.distributed script, on one or many hosts."),
    "join": ("paceline.commands.join", "Let another host join a training that is under way."),
    "predict": ("paceline.commands.predict", "Say what a trained model sees in pictures."),
    "evaluate": ("paceline.commands.evaluate", "Score a trained model on labelled data."),
    "export": ("paceline.commands.export", "Write a trained model as a version to be served."),
    "serve": ("paceline.commands.serve", "Serve models and runs over HTTP, with a page."),
    "versions": ("paceline.commands.versions", "List, promote, label and roll back versions."),
    "race": ("paceline.commands.race", "Find the fastest way to train on this machine."),
    "measure": ("paceline.commands.measure", "Measure machines, and what joins them."),
    "plan": ("paceline.commands.plan", "Decide who does what, from measurements."),
    "forecast": ("paceline.commands.forecast", "Say what more machines would give, before buying."),
    "audit": ("paceline.commands.audit", "Say how far predictions were from past runs."),
    "report": ("paceline.commands.report", "Make one offline page of a run, or of several."),
    "watch": ("paceline.commands.watch", "Look at trainings while they run, on a live page."),
    "trace": ("paceline.commands.trace", "Write a Perfetto trace of all ranks of a run."),
    "runs": ("paceline.commands.runs", "List the runs of a directory, one line each."),
    "compare": ("paceline.commands.compare", "Say what differs between two runs."),
    "models": ("paceline.commands.models", "List the models, or print one layer by layer."),
    "data": ("paceline.commands.data", "List the data sets, inspect one, or download one."),
    "lab": ("paceline.commands.lab", "An emulated cluster on this machine: run, check, clean."),
    "hosts": ("paceline.commands.hosts", "Bring bare machines to readiness over ssh."),
    "doctor": ("paceline.commands.doctor", "Check this machine: cores, memory, versions, data."),
}
FROM_SOURCE = ("bench", "experiment", "peers")
"""Commands for those who develop Paceline: `development/pyproject.toml` in its source adds them."""

ADDED = Registry[click.Command]("command", "paceline.commands", {}, click.Command)
"""Commands of other packages."""


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *(name for name in ADDED if name not in COMMANDS)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            command = importlib.import_module(COMMANDS[name][0]).command
            assert isinstance(command, click.Command)
            return command
        if name in ADDED:
            return ADDED[name]
        if name in FROM_SOURCE:
            raise UserError(
                f"`paceline {name}` comes with Paceline's source and not with the package: clone"
                " the repository and run `make train` there, which sets it up"
            )
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, text) for name, (_, text) in COMMANDS.items()]
        rows += [(name, _line_of(name)) for name in self.list_commands(ctx)[len(rows) :]]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _line_of(name: str) -> str:
    """What --help says of a command of another package, which is imported for it."""
    try:
        return ADDED[name].get_short_help_str(limit=60)
    except PacelineError as error:
        return printable(str(error))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="paceline", prog_name="paceline")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def paceline(debug: bool) -> None:
    """Train PyTorch models as fast as the machines you have allow.

    \b
    paceline train                      the embedded default: real digits, a minute
    paceline init                       a first file for what is in this folder
    paceline train my.toml              your own configuration
    paceline train --set train.epochs=2 any setting, changed on the line
    """


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 our failure, 2 the user's mistake."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Before the command: what follows may be a script's own.
    debug = "--debug" in itertools.takewhile(lambda word: word.startswith("-"), arguments)
    try:
        code = paceline.main(args=arguments, prog_name="paceline", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except (click.exceptions.Abort, KeyboardInterrupt):  # click makes the one of the other
        click.echo("paceline: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except PacelineError as error:
        if debug:
            raise
        click.echo(f"paceline: {printable(str(error))}", err=True)
        sys.exit(error.exit_code)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno in _NAMES_OF_NO_FILE:
            name = shown(error.filename)
            click.echo(f"paceline: {name} cannot be the name of a file: {error.strerror}", err=True)
            sys.exit(2)
        if is_out_of_memory(error):
            reason = printable(shortened(str(error).splitlines()[0] if str(error) else "no room"))
            click.echo(
                f"paceline: memory has run out ({reason}): use a smaller batch, smaller images,"
                " a smaller model, or fewer processes",
                err=True,
            )
            sys.exit(1)
        # A note says where it comes from; without one it is a fault of ours.
        notes = getattr(error, "__notes__", [])
        fault = f"{'' if notes else 'internal error: '}{type(error).__name__}: {error}"
        hint = "; ".join([*notes, "run again with --debug for the traceback"])
        click.echo(f"paceline: {printable(f'{fault} ({hint})')}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
