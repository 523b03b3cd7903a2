"""`paceline hosts setup`: bare machines made ready over ssh."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.launch.setup import Ready, Recipe
    from paceline.schema.hosts import Host

AT_ONCE = 8
Result = TypeVar("Result")
Say = Callable[[str], None]


@click.group("hosts", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Machines to train on.

    \b
    paceline hosts setup hosts.toml
    """


@command.command("setup")
@click.argument("hosts")
@click.option("--target", help="Folder of the environment there; {host} is the host's name.")
@click.option(
    "--wheelhouse",
    type=click.Path(path_type=Path, file_okay=False),
    help="For hosts without internet: packages go from this folder, filled first where it lacks.",
)
@click.option(
    "--packages",
    type=click.Choice(["install", "there"]),
    default="install",
    show_default=True,
    help="there: use those of the Python found on the host, install Paceline alone.",
)
@click.option("--index", metavar="URL", help="Package index instead of pip's own.")
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="The training whose data is to be placed, as data.location in hosts.toml says.",
)
@click.option("--data-target", metavar="FOLDER", help="Stands in for data.root on the hosts.")
@click.option("--dry-run", is_flag=True, help="Look, and print the commands; change nothing.")
def setup(**options: Any) -> None:
    """Bring bare machines to readiness over ssh: environment, packages, Paceline, data.

    Each needs ssh without questions and a Python of the same minor version as this one. A second
    run finds nothing to do and says so.

    \b
    paceline hosts setup hosts.toml                       packages from the internet
    paceline hosts setup hosts.toml --wheelhouse wheels   from here, over ssh
    paceline hosts setup a,b --dry-run                    the commands
    """
    from paceline.config.hosts import find_hosts

    hosts = find_hosts(options["hosts"])
    with tempfile.TemporaryDirectory(prefix="paceline-setup-") as folder:
        recipe = _recipe(Path(folder), options)
        failures: dict[str, str] = {}
        ready = _set_up(hosts.in_order, recipe, failures)
    if not recipe.dry:
        _advise({host.name: host for host in hosts.in_order}, ready)
    wrong = list(failures.values())
    if not recipe.dry or options["config_path"]:
        wrong += _data_and_check(ready, hosts.data.location, options)
    if wrong:
        raise UserError("\n".join(wrong))
    if not recipe.dry:
        changed = sum(each.changed for each in ready)
        many = "s" if len(ready) > 1 else ""
        click.echo(f"{len(ready)} host{many} ready, {changed} changed")


def _recipe(folder: Path, options: dict[str, Any]) -> Recipe:
    """Everything that is the same for all hosts."""
    import shlex

    from paceline.launch import wheelhouse
    from paceline.launch.setup import TARGET, Recipe

    packages: Literal["install", "there"] = options["packages"]
    house: Path | None = options["wheelhouse"]
    requirements = wheelhouse.running_packages() if packages == "install" else ()
    wheels: list[Path] = []
    if house is not None and packages == "install":
        wheels, lacking = wheelhouse.wheels_of(house, requirements)
        if lacking:
            downloads = wheelhouse.download_commands(house, lacking, options["index"])
            if options["dry_run"]:
                for words in downloads:
                    click.echo(f"here, and its wheels are copied too: {shlex.join(words)}")
            else:
                click.echo(f"here: filling {house} with {len(lacking)} wheels")
                house.mkdir(parents=True, exist_ok=True)
                wheelhouse.fill_wheelhouse(downloads)
                wheels, lacking = wheelhouse.wheels_of(house, requirements)
                if lacking:
                    raise UserError(f"{house} lacks {', '.join(lacking)}: put their wheels there")
    return Recipe(
        target=options["target"] or TARGET,
        requirements=requirements,
        paceline=wheelhouse.pack_paceline(folder),
        packages=packages,
        wheels=tuple(wheels),
        offline=house is not None,
        index=options["index"],
        dry=options["dry_run"],
    )


def _set_up(hosts: tuple[Host, ...], recipe: Recipe, failures: dict[str, str]) -> list[Ready]:
    """All hosts, some at once; one that fails does not stop the others."""
    from paceline.launch.setup import HostSetup

    def one(host: Host, say: Say) -> Ready:
        return HostSetup(host, recipe, say).run()

    return _at_once(hosts, one, failures)


def _at_once(
    hosts: tuple[Host, ...], work: Callable[[Host, Say], Result], failures: dict[str, str]
) -> list[Result]:
    lock = threading.Lock()

    def say(host: Host, text: str) -> None:
        with lock:
            click.echo(f"{host.name}: {text}")

    def guarded(host: Host) -> list[Result]:
        try:
            return [work(host, lambda text: say(host, text))]
        except UserError as error:
            failures[host.name] = str(error)
            return []

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [result for found in pool.map(guarded, hosts) for result in found]


def _advise(before: dict[str, Host], ready: list[Ready]) -> None:
    """What hosts.toml must say so that training uses the environments."""
    changed = [each.host for each in ready if each.host.python != before[each.host.name].python]
    if not changed:
        return
    paths = {host.python for host in changed}
    if len(paths) == 1 and len(changed) == len(before):
        click.echo(f'put into hosts.toml:\n\n    [defaults]\n    python = "{paths.pop()}"\n')
        return
    click.echo("put into hosts.toml:\n")
    for host in changed:
        click.echo(f'    [[host]]\n    name = "{host.name}"\n    python = "{host.python}"\n')


def _data_and_check(ready: list[Ready], location: str, options: dict[str, Any]) -> list[str]:
    """Place the data, then ask every host what training will ask; what is still wrong."""
    from paceline.api import resolve
    from paceline.config import load_config
    from paceline.launch.inspection import inspect_hosts, wanted_facts
    from paceline.launch.placing import make_parcel

    if not ready:
        return []
    path: Path | None = options["config_path"]
    here = wanted_facts(resolve(load_config(path)))
    there = {**here, "root": options["data_target"] or here["root"]}
    hosts = tuple(each.host for each in ready)
    failures: dict[str, str] = {}
    parcel = make_parcel(here, options["data_target"]) if path and location == "copy" else None
    if options["dry_run"]:
        for host in hosts if parcel else ():
            assert parcel is not None
            click.echo(f"{host.name}: if it lacks the data: {parcel.commands(host)}")
        return []
    found = inspect_hosts(hosts, there)
    if parcel is not None:

        def send(host: Host, say: Say) -> None:
            assert parcel is not None
            say(f"copying data {parcel.name!r} to {parcel.destination}")
            parcel.send(host)

        lacking = {name for name, facts in found.facts.items() if facts["data"] == "none"}
        _at_once(tuple(host for host in hosts if host.name in lacking), send, failures)
        if lacking:
            found = inspect_hosts(hosts, there)
        failures |= {
            name: f"host {name} has other data than this machine: the names or sizes of its files"
            f" differ; move {parcel.destination} away there and set it up again"
            for name, facts in found.facts.items()
            if name not in failures and facts["data"] != parcel.fingerprint
        }
    elif path is not None:
        for name, facts in found.facts.items():
            click.echo(f"{name}: data {here['data']!r} ({location}): {facts['data']}")
    # What was said of a host's data above is not said again in other words.
    return list(failures.values()) + [
        sentence
        for sentence in found.problems()
        if not any(sentence.startswith(f"host {name} ") for name in failures)
    ]
