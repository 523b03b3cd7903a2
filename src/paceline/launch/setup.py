"""Brings one host to readiness over ssh: Python found, environment made, packages installed.

Nothing but sh, tar and a Python of the same minor version is taken for granted there. A mark in
the environment says what it was made from, so that a second run finds nothing to do; it also says
that the folder is ours: a folder without it is never written to.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import UserError, shortened
from paceline.launch.inspection import read_object, with_remedy
from paceline.launch.ssh import ssh_words
from paceline.launch.wheelhouse import by_index, hashed_requirements, last_error
from paceline.schema.hosts import Host
from paceline.schema.plain import ONE_LINE, checked

TARGET = "~/.local/share/paceline/environment"
MARK = "paceline-setup.json"
_PROBE_SECONDS = 45.0
_STEP_SECONDS = 3600.0

# Runs with whatever Python is found there; exit code 3: the next one is tried.
_PROBE = f"""
import json, os, platform, sys, sysconfig
target = os.path.realpath(os.path.expanduser(sys.argv[1]))
if "%d.%d" % sys.version_info[:2] != sys.argv[2]:
    sys.exit(3)
try:
    mark = json.load(open(os.path.join(target, "{MARK}")))
except (OSError, ValueError):
    mark = None
own = os.path.realpath(sys.prefix) == target
try:
    import ensurepip, venv
    able = True
except ImportError:
    able = False
print(json.dumps({{
    "target": target,
    "python": mark["base"] if own and mark else sys.executable,
    "site": mark["site"] if own and mark else sysconfig.get_path("purelib"),
    "mark": mark,
    "occupied": mark is None and os.path.isdir(target) and bool(os.listdir(target)),
    "environment": os.access(os.path.join(target, "bin", "python"), os.X_OK),
    "able": able,
    "machine": platform.machine(),
}}))
"""


_ANSWER = {
    "target": ONE_LINE, "python": ONE_LINE, "site": ONE_LINE, "occupied": bool, "able": bool,
    "environment": bool, "machine": ONE_LINE, "mark?": {"state?": ONE_LINE, "packages?": ONE_LINE},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every host is to have."""

    target: str
    """Folder of the environment; {host} stands for the host's name."""
    requirements: tuple[str, ...]
    """`name==version` each."""
    paceline: Path
    """Paceline's wheel."""
    packages: Literal["install", "there"] = "install"
    """"there": use those of the Python that is found, install Paceline alone."""
    wheels: tuple[Path, ...] = ()
    """Copied to the host."""
    offline: bool = False
    """Nothing comes from the internet: the wheels are all there is."""
    index: str | None = None
    dry: bool = False
    """Print what would be done."""

    @property
    def state(self) -> str:
        """What the mark of a finished environment says."""
        return hashlib.sha256(self.package_state.encode() + self.paceline.read_bytes()).hexdigest()

    @property
    def package_state(self) -> str:
        """The same without Paceline itself, which changes more often."""
        parts = [_minor(), self.packages, *self.requirements]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A host that has been set up."""

    host: Host
    """With `python` of the environment."""
    changed: bool


def _minor() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


class HostSetup:
    """The steps on one host."""

    def __init__(self, host: Host, recipe: Recipe, say: Callable[[str], None]) -> None:
        self.host = host
        self.recipe = recipe
        self.say = say
        self.target = recipe.target.replace("{host}", host.name)

    def run(self) -> Ready:
        """Do what is missing; an error of one sentence where that is not possible."""
        found = self.probe()
        target = found["target"]
        ready = Host(**{**vars(self.host), "python": f"{target}/bin/python"})
        mark = found.get("mark")
        if mark and mark.get("state") == self.recipe.state and found["environment"]:
            self.say(f"{target} is as it should be: nothing to do")
            return Ready(host=ready, changed=False)
        self.refuse(found)
        note = {"base": found["python"], "site": found["site"]}
        # Cleared before anything is touched, so that what was interrupted is done again.
        packages = {"packages": self.recipe.package_state}
        has_packages = found["environment"] and mark and mark.get("packages") in packages.values()
        begun = note | {"state": "begun"} | (packages if has_packages else {})
        place = shlex.quote(target)
        self.step(
            f"environment {target} with {found['python']}",
            f"mkdir -p {place} && {_write(f'{target}/{MARK}', begun)}"
            f" && {shlex.quote(found['python'])} -m venv {place}",
        )
        self.send_wheels(target, () if has_packages else self.recipe.wheels)
        if self.recipe.packages == "install" and not has_packages:
            self.install_packages(target)
        self.install_paceline(target, found["site"])
        self.step(
            "done",
            f"rm -rf {place}/wheels && "
            + _write(f"{target}/{MARK}", note | packages | {"state": self.recipe.state}),
        )
        return Ready(host=ready, changed=True)

    def probe(self) -> dict[str, Any]:
        """What is there: the first Python of our minor version, and what it says."""
        names = [f"python{_minor()}", "python3", "python", f"/usr/local/bin/python{_minor()}"]
        names = [*([self.host.python] if self.host.python else []), *names, sys.executable]
        arguments = shlex.join(["-c", _PROBE, self.target, _minor()])
        words = " ".join(shlex.quote(name) for name in dict.fromkeys(names))
        script = (
            f"for each in {words}; do"
            f' command -v "$each" >/dev/null 2>&1 && "$each" {arguments} 2>/dev/null && exit 0;'
            " done; exit 3"
        )
        code, out, errors = self.call(script, seconds=_PROBE_SECONDS)
        if code == 3:
            raise UserError(
                f"host {self.host.name} has no Python {_minor()} (looked for {words}): install it,"
                " or give its path as `python` in hosts.toml"
            )
        found = next(filter(None, map(read_object, reversed(out.encode().splitlines()))), None)
        if found is None:
            words = with_remedy(shortened(last_error(errors)))
            raise UserError(f"host {self.host.name} does not answer: {words}")
        try:
            return dict(checked(found, _ANSWER))
        except ValueError as error:
            raise UserError(
                f"host {self.host.name} answers what cannot be used: {error}; remove"
                f" {self.target}/{MARK} there"
            ) from None

    def refuse(self, found: dict[str, Any]) -> None:
        """Stop before anything is changed."""
        name = self.host.name
        if found["occupied"]:
            raise UserError(
                f"{found['target']} on host {name} holds something that is not ours: choose another"
                " folder with --target, or empty it"
            )
        if not found["able"]:
            raise UserError(
                f"{found['python']} on host {name} cannot make environments: install its venv"
                f" module (Debian: apt-get install python{_minor()}-venv)"
            )
        here = platform.machine()
        if self.recipe.offline and found["machine"] != here:
            raise UserError(
                f"host {name} is a {found['machine']} and the wheelhouse was made for {here}: leave"
                " --wheelhouse out there, or make one on such a machine"
            )

    def send_wheels(self, target: str, others: tuple[Path, ...]) -> None:
        wheels = (self.recipe.paceline, *others)
        size = sum(path.stat().st_size for path in wheels) / 1e6
        place = shlex.quote(f"{target}/wheels")
        words = ["tar", "-cf", "-"]
        for path in wheels:
            words += ["-C", str(path.parent.resolve()), path.name]
        self.step(
            f"copying {len(wheels)} wheel{'s' if len(wheels) > 1 else ''}, {size:,.1f} MB",
            f"mkdir -p {place} && tar -C {place} -xf -",
            source=words,
        )

    def install_packages(self, target: str) -> None:
        recipe = self.recipe
        what = f"{len(recipe.requirements)} packages from"
        if recipe.offline:
            self.step(f"{what} the copied wheels", _install_wheels(target, recipe.wheels))
            return
        groups = by_index(recipe.requirements, recipe.index)
        self.step(
            f"{what} the internet",
            " && ".join(f"{_pip(target)} {shlex.join([*o, *names])}" for o, names in groups),
        )

    def install_paceline(self, target: str, site: str) -> None:
        recipe = self.recipe
        script = _install_wheels(target, (recipe.paceline,), "--force-reinstall")
        if recipe.packages == "there":
            packages = f"{target}/lib/python{_minor()}/site-packages/paceline-packages.pth"
            script += f" && printf '%s\\n' {shlex.quote(site)} > {shlex.quote(packages)}"
        self.step(f"Paceline itself ({recipe.paceline.name})", script)

    def step(self, what: str, script: str, source: list[str] | None = None) -> None:
        """Say it and do it, or only say it."""
        if self.recipe.dry:
            before = f"{shlex.join(source)} | " if source else ""
            self.say(before + shlex.join(self.words(script)))
            return
        if what != "done":
            self.say(what)
        code, _, errors = self.call(script, source=source, seconds=_STEP_SECONDS)
        if code != 0:
            name = self.host.name
            remedy = ""
            if "No matching distribution" in errors or "connection" in errors.lower():
                remedy = "; where the host has no internet, give --wheelhouse DIR"
            raise UserError(
                f"setting up host {name} failed at `{what}`:"
                f" {with_remedy(shortened(last_error(errors)))}" + remedy
            )

    def words(self, script: str) -> list[str]:
        return ssh_words(self.host, ["sh", "-c", script])

    def call(
        self, script: str, *, source: list[str] | None = None, seconds: float
    ) -> tuple[int, str, str]:
        """Exit code and output of a script there, with the output of `source` as its input."""
        return run_there(self.words(script), source=source, seconds=seconds)


def run_there(
    words: list[str], *, source: list[str] | None = None, seconds: float
) -> tuple[int, str, str]:
    """Exit code and output of a command, fed by another where `source` is given."""
    feeding = subprocess.Popen(source, stdout=subprocess.PIPE) if source else None
    given = feeding.stdout if feeding else subprocess.DEVNULL
    try:
        done = subprocess.run(
            words, stdin=given, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return 255, "", f"it did not end within {seconds:.0f} s"
    except OSError as error:
        return 255, "", str(error)
    finally:
        if feeding is not None:
            assert feeding.stdout is not None
            feeding.stdout.close()
            broken = feeding.wait() != 0
    if feeding is not None and broken and done.returncode == 0:
        return 1, done.stdout, "tar could not read everything here"
    return done.returncode, done.stdout, done.stderr


def _pip(target: str) -> str:
    python = shlex.quote(f"{target}/bin/python")
    return f"{python} -m pip install --quiet --no-deps --disable-pip-version-check"


def _install_wheels(target: str, wheels: tuple[Path, ...], *options: str) -> str:
    """Shell words that install wheels that were sent, if they are what was sent."""
    folder = f"{target}/wheels"
    lines = shlex.quote(hashed_requirements(wheels, folder))
    place = shlex.quote(f"{folder}/hashes.txt")
    words = shlex.join(["--no-index", "--require-hashes", *options, "-r"])
    return f"printf '%s' {lines} > {place} && {_pip(target)} {words} {place}"


def _write(path: str, content: dict[str, str]) -> str:
    """Shell words that write a small JSON file whole or not at all."""
    text, place = shlex.quote(json.dumps(content)), shlex.quote(path)
    partial = shlex.quote(f"{path}.partial")
    return f"printf '%s' {text} > {partial} && mv {partial} {place}"
