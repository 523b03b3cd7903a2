"""`paceline ARGUMENTS` whose hosts, this machine several times, do not see the launcher's run.

Only what the agents are told is different: a marker that is nowhere. So each works in a folder of
its own below the cache, as on a machine of its own.
"""

from __future__ import annotations

import secrets
import sys

from paceline import cli
from paceline.launch.joining import welcome_fields
from paceline.launch.scripts import on_hosts
from paceline.launch.session import Session
from paceline.schema.hosts import NodePlace
from paceline.workflow import spread


class Private(Session):
    """Hosts that share no files."""

    def welcome(self, place: NodePlace) -> None:
        fields = welcome_fields(self, place) | {"marker": secrets.token_hex(16)}
        self.control.send(place.node, "welcome", **fields)


class PrivateSession(Private):
    """Of a training."""


class PrivateScript(Private, on_hosts.ScriptSession):
    """Of a script."""


if __name__ == "__main__":
    spread.Session = PrivateSession  # type: ignore[misc]
    on_hosts.ScriptSession = PrivateScript  # type: ignore[misc]
    cli.main(sys.argv[1:])
