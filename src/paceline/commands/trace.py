"""`paceline trace`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("trace")
@click.argument("run", type=click.Path(path_type=Path), default=Path("runs/latest"))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File to write; RUN/trace.json when left out. A name in .gz is compressed.",
)
@click.option("--all-sessions", is_flag=True, help="Of a continued run, all parts, not the last.")
def command(run: Path, output: Path | None, all_sessions: bool) -> None:
    """Write a trace of all ranks of RUN, to be looked at in Perfetto or Chrome.

    Open it at https://ui.perfetto.dev (it stays in your browser) or chrome://tracing. RUN is
    runs/latest when left out.

    \b
    paceline trace
    paceline trace runs/one --output one.json.gz
    """
    from paceline.errors import RunDirectoryError
    from paceline.observe.trace import make_trace, write_trace
    from paceline.run import open_run
    from paceline.schema.events import read_run

    directory = open_run(run)
    ranks = read_run(directory.path)
    if not ranks:
        raise RunDirectoryError(
            f"{run} has no rank-*/events.jsonl to make a trace of: it has not begun to train, or"
            " was trained with observe.events = false"
        )
    sessions = [s for past in ranks.values() for s in (past if all_sessions else past[-1:])]
    path = output or directory.path / "trace.json"
    try:
        write_trace(path, make_trace(sessions))
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror}") from None
    seconds = max(s.common(s.ended) for s in sessions) - min(s.common(s.began) for s in sessions)
    spans = sum(len(session.spans) for session in sessions)
    click.echo(
        f"{path}: {len(ranks)} rank{'s' if len(ranks) > 1 else ''}, {spans} spans,"
        f" {seconds:.1f} s; open it at https://ui.perfetto.dev"
    )
