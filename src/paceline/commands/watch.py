"""`paceline watch`, and what `paceline train --watch` starts beside a training."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from paceline.errors import ConfigError, UnsupportedError
from paceline.run import open_run

PORT = 8600


@click.command("watch")
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@click.option("--text", is_flag=True, help="In the terminal instead of a page.")
@click.option("--once", is_flag=True, help="With --text: as it is now, and end.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", default=PORT, show_default=True, type=click.IntRange(0, 65535))
@click.option("--token-file", type=click.Path(path_type=Path), help="A secret that viewers send.")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="Certificate (PEM).")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its key (PEM).")
@click.option("--plain", is_flag=True, help="No TLS: something before the page encrypts.")
def command(
    runs: tuple[Path, ...],
    text: bool,
    once: bool,
    host: str,
    port: int,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    plain: bool,
) -> None:
    """Look at trainings while they run: a live page, or the terminal.

    RUN is runs/latest when left out; several are shown side by side. It reads the files of the
    runs and costs the trainings nothing. The page can save, stop, and change how long one trains.

    \b
    paceline watch
    paceline watch runs/one runs/two --port 8601
    paceline watch --text                      over ssh
    """
    paths = list(dict.fromkeys(path.resolve() for path in runs or (Path("runs/latest"),)))
    for path in paths:
        open_run(path)
    if once and not text:
        raise ConfigError("--once belongs to --text: a page stays")
    if text:
        from paceline.watch.terminal import watch_text

        with contextlib.suppress(KeyboardInterrupt):
            watch_text(paths, once=once)
        return
    from paceline.commands.serve import read_token

    try:
        from paceline.serve.door import Listener
        from paceline.watch.server import serve
    except ImportError as error:
        raise UnsupportedError(
            f"the page needs the package {error.name}: pip install 'paceline[serve]', or look with"
            " `paceline watch --text`"
        ) from None
    door = Listener(
        host=host,
        port=port,
        token=read_token(token_file),
        certificate=tls_cert,
        key=tls_key,
        plain=plain,
        drain=2,
    )
    serve(paths, door, click.echo)


@contextlib.contextmanager
def watching(run: Path, wanted: bool, say: Callable[[str], None]) -> Iterator[None]:
    """A page beside a training, in a process of the lowest priority, until the training is over."""
    if not wanted:
        yield
        return
    words = [sys.executable, "-m", "paceline", "watch", str(run), "--port", "0"]
    process = subprocess.Popen(
        ["nice", "-n", "19", *words], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        said = process.stdout.readline().rstrip()
        say(said or "warning: the page did not come up: `paceline watch` says why")
        yield
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
