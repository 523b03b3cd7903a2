"""`paceline versions`: which versions of a model there are, and which are served."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from paceline.errors import ConfigError, PacelineError
from paceline.schema.codec import read_json
from paceline.schema.version import Serving, Version
from paceline.serve.versions import (
    checked_folder,
    checked_name,
    read_serving,
    served_numbers,
    stable_before,
    version_numbers,
    write_serving,
)

FOLDER = click.argument("folder", type=click.Path(path_type=Path))


@click.group("versions")
def command() -> None:
    """Versions by hand: FOLDER is models/NAME; a server that watches it follows at once.

    \b
    paceline versions list models/digits
    paceline versions promote models/digits 4      requests that name no version go to 4
    paceline versions promote models/digits latest ... to the newest again, whichever it is
    paceline versions rollback models/digits       ... to the one before
    paceline versions label models/digits canary 5 --percent 10
    paceline versions policy models/digits all
    """


@command.command("list")
@FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, and only that.")
def list_versions(folder: Path, as_json: bool) -> None:
    """The versions, where they came from, and which are served.

    \b
    paceline versions list models/digits
    """
    serving, numbers = read_serving(checked_folder(folder)), version_numbers(folder)
    rows = [_row(folder, number, serving) for number in numbers]
    served = served_numbers(serving, _loadable(rows))
    rows = [row | {"served": row["version"] in served} for row in rows]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        labels = f" [{', '.join(row['labels'])}]" if row["labels"] else ""
        state = "served" if row["served"] else "-"
        if "error" in row:
            click.echo(f"{row['version']:>5}  {state:6}  damaged: {row['error']}{labels}")
            continue
        accuracy = row["metrics"].get("test_accuracy")
        told = f"{accuracy:7.2%}" if accuracy is not None else "      -"
        click.echo(
            f"{row['version']:>5}  {state:6}  {told}  update {row['update']:<7} {row['kind']:11}"
            f"  {row['made']}  {row['run']}{labels}"
        )


def _loadable(rows: list[dict[str, Any]]) -> list[int]:
    """Without those that reading would unpickle: a server passes over them."""
    return [row["version"] for row in rows if row.get("kind") != "torch"]


def _row(folder: Path, number: int, serving: Serving) -> dict[str, Any]:
    labels = sorted(name for name, version in serving.labels.items() if version == number)
    row: dict[str, Any] = {"version": number, "labels": labels}
    try:
        version = read_json(Version, folder / str(number) / "version.json")
    except PacelineError as error:
        return row | {"error": str(error)}
    return row | {
        "kind": version.kind,
        "made": version.made,
        "run": version.origin.run,
        "update": version.origin.update,
        "metrics": version.origin.metrics,
    }


@command.command()
@FOLDER
@click.argument("version")
def promote(folder: Path, version: str) -> None:
    """Let VERSION answer the requests that name none; `latest`: whichever is the newest.

    \b
    paceline versions promote models/digits 3
    """
    serving = read_serving(checked_folder(folder))
    labels = {name: number for name, number in serving.labels.items() if name != "stable"}
    if version != "latest":
        labels["stable"] = _number(folder, version)
        if labels.get("canary") == labels["stable"]:
            del labels["canary"]
    write_serving(folder, dataclasses.replace(serving, labels=labels))
    click.echo(f"{folder}: requests that name no version go to {version}")


@command.command()
@FOLDER
def rollback(folder: Path) -> None:
    """Let the version before the current one answer, until another is promoted.

    \b
    paceline versions rollback models/digits
    """
    serving = read_serving(checked_folder(folder))
    rows = [_row(folder, number, serving) for number in version_numbers(folder)]
    number = stable_before(serving, _loadable(rows))
    labels = {name: one for name, one in serving.labels.items() if name != "canary"}
    write_serving(folder, dataclasses.replace(serving, labels=labels | {"stable": number}))
    click.echo(f"{folder}: requests that name no version go to {number}")


@command.command()
@FOLDER
@click.argument("name")
@click.argument("version", required=False)
@click.option("--percent", type=click.FloatRange(0, 100), help="For canary: of requests.")
def label(folder: Path, name: str, version: str | None, percent: float | None) -> None:
    """Give VERSION the label NAME, by which it can be asked for; without VERSION, take it away.

    \b
    paceline versions label models/digits canary 4
    """
    serving = read_serving(checked_folder(folder))
    checked_name(name, "label")
    if percent is not None and name != "canary":
        raise ConfigError("--percent belongs to the label canary")
    labels = {one: number for one, number in serving.labels.items() if one != name}
    if version is not None:
        labels[name] = _number(folder, version)
    share = serving.canary_percent if percent is None else percent
    share = share if "canary" in labels else 0.0
    serving = dataclasses.replace(serving, labels=labels, canary_percent=share)
    if 0 < share < 100 and not _others(folder, serving):
        raise ConfigError(
            f"version {labels['canary']} would answer all requests, not {share:g}%, as no other one"
            f" is served: `paceline versions promote {folder} NUMBER` says who answers the rest"
        )
    write_serving(folder, serving)
    click.echo(f"{folder}: {name} is {version if version is not None else 'no label any more'}")


@command.command()
@FOLDER
@click.argument("policy", type=click.Choice(["latest", "all", "specific"]))
@click.argument("versions", nargs=-1)
def policy(folder: Path, policy: Any, versions: tuple[str, ...]) -> None:
    """Serve the latest version, all of them, or specific VERSIONS (besides labelled ones).

    \b
    paceline versions policy models/digits all
    """
    serving = read_serving(checked_folder(folder))
    if bool(versions) != (policy == "specific"):
        raise ConfigError("name versions with the policy specific, and only with it")
    numbers = tuple(_number(folder, one) for one in versions)
    write_serving(folder, dataclasses.replace(serving, policy=policy, versions=numbers))
    click.echo(f"{folder}: {' '.join([policy, *versions])}")


def _others(folder: Path, serving: Serving) -> list[int]:
    """Who answers what the canary does not."""
    rows = [_row(folder, number, serving) for number in version_numbers(folder)]
    served = served_numbers(serving, _loadable(rows))
    return [number for number in served if number != serving.labels["canary"]]


def _number(folder: Path, text: str) -> int:
    there = version_numbers(folder)
    if text not in map(str, there):
        raise ConfigError(f"{folder} has no version {text}: it has {', '.join(map(str, there))}")
    if _row(folder, int(text), Serving()).get("kind") == "torch":
        raise ConfigError(
            f"{folder / text} is of the format 'torch', which no server reads: name another, or"
            " export it again with --format onnx"
        )
    return int(text)
