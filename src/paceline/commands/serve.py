"""`paceline serve`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from paceline.errors import ConfigError, UnsupportedError, shown


@click.command("serve")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", default=8500, show_default=True, type=click.IntRange(0, 65535))
@click.option("--token-file", type=click.Path(path_type=Path), help="A secret that clients send.")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="Certificate (PEM).")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its key (PEM).")
@click.option("--plain", is_flag=True, help="No TLS: something before the server encrypts.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--batch", type=click.IntRange(1, 4096), help="Samples of a batch; else measured.")
@click.option("--wait", default=2.0, show_default=True, help="Milliseconds a part batch waits.")
@click.option("--queue", default=1024, show_default=True, type=click.IntRange(1), help="Samples.")
@click.option("--timeout", default=30.0, show_default=True, help="Seconds for a request.")
@click.option("--memory", metavar="SIZE", help="Models loaded at once, as 2GB; else all.")
@click.option("--max-body", default="32MB", show_default=True, metavar="SIZE")
@click.option("--max-pixels", default=50_000_000, show_default=True, help="Of a picture.")
@click.option("--poll", default=1.0, show_default=True, help="Seconds between looks at folders.")
def command(
    paths: tuple[Path, ...],
    host: str,
    port: int,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    plain: bool,
    device: str,
    batch: int | None,
    wait: float,
    queue: int,
    timeout: float,
    memory: str | None,
    max_body: str,
    max_pixels: int,
    poll: float,
) -> None:
    """Serve the models in PATHS: folders of models/NAME/VERSION, and runs as they are.

    New versions are loaded while the old ones answer. Speaks TensorFlow Serving's REST and the
    Open Inference Protocol; a page for people is at /.

    \b
    paceline serve models/
    paceline serve models/ runs/latest --port 8501
    """
    try:
        from paceline.serve.core import Limits
        from paceline.serve.door import Listener
        from paceline.serve.manager import Options
        from paceline.serve.server import Server
    except ImportError as error:
        raise UnsupportedError(
            f"serving needs the package {error.name}: pip install 'paceline[serve]'"
        ) from None
    for name, value in (("--wait", wait), ("--timeout", timeout), ("--poll", poll)):
        if not 0 <= value < 1e6 or (name != "--wait" and not value):
            raise ConfigError(f"{name} {value} must be a time above 0")
    body = size_of(max_body, "--max-body")
    Server(
        paths=paths,
        door=Listener(
            host=host,
            port=port,
            token=read_token(token_file),
            certificate=tls_cert,
            key=tls_key,
            plain=plain,
        ),
        options=Options(
            device=device,
            batch=batch,
            wait=wait / 1000,
            queue=queue,
            memory=size_of(memory, "--memory") if memory else None,
        ),
        limits=Limits(
            body=body,
            bodies=max(8 * body, 256 << 20),
            samples=queue,
            pixels=max_pixels,
            seconds=timeout,
        ),
        poll=poll,
        say=click.echo,
    ).run()


def size_of(text: str, option: str) -> int:
    """Bytes, as people write them.

    >>> size_of("2GB", "--memory"), size_of("10", "--memory")
    (2000000000, 10)
    """
    found = re.fullmatch(r"(\d{1,15})\s*([kMGT]?)B?", text)
    if found is None or not int(found[1]):
        raise ConfigError(f"{option} {shown(text)} must be a size, as 500MB or 2GB")
    return int(found[1]) * int(1000 ** " kMGT".index(found[2] or " "))


def read_token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file} cannot be read: {error}") from None
    if not token.isascii() or any(each.isspace() for each in token):
        raise ConfigError(f"--token-file {file} must hold one word of ASCII characters")
    return token
