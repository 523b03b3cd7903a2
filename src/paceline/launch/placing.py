"""Places a data set on a host: tar over ssh, checked by its fingerprint afterwards."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.base import DataRequest
from paceline.errors import UserError
from paceline.launch.checks import data_fingerprint, data_place
from paceline.launch.inspection import with_remedy
from paceline.launch.setup import run_there
from paceline.launch.ssh import ssh_words
from paceline.launch.wheelhouse import last_error
from paceline.references import is_reference
from paceline.schema.hosts import Host

_COPY_SECONDS = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A data set of this machine, and where it belongs on the hosts."""

    name: str
    place: Path
    """Folder or file here."""
    destination: str
    """The same there; a leading ~ is the home folder of whoever ssh is."""
    fingerprint: str

    def script(self) -> str:
        """Unpacks beside the destination and moves it there when it is whole."""
        destination = _with_home(self.destination)
        partial = _with_home(f"{self.destination}.paceline-copy")
        # `mv` into a folder that has appeared meanwhile would nest the two.
        return (
            f"test ! -e {destination} && rm -rf {partial} && mkdir -p {partial}"
            f" && tar -C {partial} -xf - && mv {partial}/{shlex.quote(self.place.name)}"
            f" {destination} && rm -rf {partial}"
        )

    def pack(self) -> list[str]:
        return ["tar", "-C", str(self.place.parent), "-cf", "-", self.place.name]

    def commands(self, host: Host) -> str:
        """What `send` does, for reading."""
        return f"{shlex.join(self.pack())} | {shlex.join(self._words(host))}"

    def send(self, host: Host) -> None:
        """Copy it; an error of one sentence where that fails."""
        code, _, errors = run_there(self._words(host), source=self.pack(), seconds=_COPY_SECONDS)
        if code == 0:
            return
        if not errors.strip():
            reason = f"{self.destination} is there already: move it away, or make it equal"
        else:
            reason = with_remedy(last_error(errors))
        raise UserError(f"the data could not be copied to host {host.name}: {reason}")

    def _words(self, host: Host) -> list[str]:
        return ssh_words(host, ["sh", "-c", self.script()])


def _with_home(path: str) -> str:
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    return shlex.quote(path)


def make_parcel(wanted: dict[str, Any], root: str | None) -> Parcel | None:
    """The data that a configuration wants, to go below `root` there; None: it needs no files.

    Without `root` it goes to the same path as here, because that is where training looks.
    """
    name = wanted["data"]
    if is_reference(name):
        raise UserError(
            f"data = {name!r} is made by your own code, which knows its files: set data.location ="
            ' "local" and place them yourself'
        )
    request = DataRequest(name=name, root=wanted.get("root"), cache=wanted.get("cache"))
    fingerprint = data_fingerprint(wanted)
    if fingerprint == "none":
        raise UserError(
            f"data {name!r} is not on this machine, so it cannot be copied: `paceline data get"
            f" {name}` or PACELINE_DATA, or set data.location in hosts.toml"
        )
    place = data_place(request)
    if place is None:
        return None
    place = place.absolute()
    destination = str(place)
    if root is not None:
        if not request.root or not place.is_relative_to(request.root):
            raise UserError(
                f"--data-target {root!r} stands in for data.root, and {place} is not below it: set"
                " data.root or PACELINE_DATA, or leave --data-target out"
            )
        destination = str(Path(root) / place.relative_to(request.root))
    elif not request.root and place.is_relative_to(Path.home()):
        destination = f"~/{place.relative_to(Path.home())}"
    return Parcel(name=name, place=place, destination=destination, fingerprint=fingerprint)
