"""A script of the user's own that `paceline run` starts, and how each of its ranks ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from paceline.errors import RunDirectoryError
from paceline.schema.codec import decode, encode, rule
from paceline.schema.plain import read_toml
from paceline.text import how_it_ended


@dataclass(frozen=True, kw_only=True)
class Script:
    """What is run: config.toml of a script's run has it, and every host reads it there."""

    target: str
    """The absolute path of the script, or the module's name."""
    is_module: bool = False
    """Started as `python -m target`."""
    arguments: tuple[str, ...] = ()
    folder: str = "."
    """Where it is started."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that ranks get beside those of their host."""
    stall_seconds: float = rule(default=60.0, minimum=0.0, maximum=1e9)
    """A rank that prints nothing and uses no CPU for so long is named; 0: none is."""
    interfaces: tuple[str, ...] = ()
    """By node: the network interface that the other hosts reach it by; empty where unknown."""
    sources: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the script and of the modules beside it that it imports, by path."""

    @property
    def words(self) -> list[str]:
        """What follows the interpreter on a rank's command line."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]


def script_text(name: str, script: Script) -> str:
    """What config.toml of a script's run says."""
    return tomli_w.dumps({"name": name, "script": encode(script)})


def read_script(path: Path) -> Script:
    """The script of a config.toml."""
    tables = read_toml(path)
    if "script" not in tables:
        raise RunDirectoryError(f"{path} has no [script]: `paceline run` did not write it")
    return decode(Script, tables["script"], "script")


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How one rank ended: exit.json in its folder."""

    rank: int
    host: str = "localhost"
    code: int = 0
    """Its exit code; negative: the signal that killed it."""
    seconds: float = 0.0
    ended_by_us: bool = False
    """It was told to end because another rank had failed, or because the user wanted it."""

    @property
    def has_failed(self) -> bool:
        """By itself, not because we wanted it to end."""
        return self.code != 0 and not self.ended_by_us

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 and the signal's number for who was killed.

        >>> RankExit(rank=0, code=-9).exit_code
        137
        """
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def how(self) -> str:
        """In words."""
        return how_it_ended(self.code)
