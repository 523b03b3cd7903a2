"""The only reader of environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.schema.rank import RankContext


def data_root(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Folder with data sets: PACELINE_DATA, or None."""
    value = environment.get("PACELINE_DATA")
    return Path(value).expanduser() if value else None


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Folder for what can be made again: PACELINE_CACHE, or the user's cache folder."""
    value = environment.get("PACELINE_CACHE")
    if value:
        return Path(value).expanduser()
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def instruction_limit(environment: Mapping[str, str] = os.environ) -> str | None:
    """The newest instruction set that oneDNN may use, where someone has set one."""
    return environment.get("ONEDNN_MAX_CPU_ISA")


def limit_instructions(name: str) -> None:
    """Keep oneDNN in this process, and in those it starts, to an older instruction set."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = name


def rank_context(environment: Mapping[str, str] = os.environ) -> RankContext:
    """This process's place, from what the engine that started it has set."""
    if "PACELINE_RANK" not in environment:
        return RankContext()

    def number(name: str) -> int:
        value = environment.get(name, "")
        if not value.lstrip("-").isdigit():
            raise ConfigError(f"{name} = {value!r} must be a whole number: the launcher sets it")
        return int(value)

    return RankContext(
        rank=number("PACELINE_RANK"),
        world_size=number("PACELINE_WORLD_SIZE"),
        local_rank=number("PACELINE_LOCAL_RANK"),
        local_size=number("PACELINE_LOCAL_SIZE"),
        node=number("PACELINE_NODE"),
        nodes=number("PACELINE_NODES"),
        address=environment.get("PACELINE_ADDRESS", "127.0.0.1"),
        port=number("PACELINE_PORT"),
        backend=environment.get("PACELINE_BACKEND", "gloo"),
    )


def rank_environment(context: RankContext) -> dict[str, str]:
    """What `rank_context` reads back."""
    return {
        "PACELINE_RANK": str(context.rank),
        "PACELINE_WORLD_SIZE": str(context.world_size),
        "PACELINE_LOCAL_RANK": str(context.local_rank),
        "PACELINE_LOCAL_SIZE": str(context.local_size),
        "PACELINE_NODE": str(context.node),
        "PACELINE_NODES": str(context.nodes),
        "PACELINE_ADDRESS": context.address,
        "PACELINE_PORT": str(context.port),
        "PACELINE_BACKEND": context.backend,
    }


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Descriptors that the launcher of a node hands down to its ranks."""

    board: int
    arena: int
    parent: int
    """The launcher's process."""
    silent: bool = False
    """The first rank shows no progress."""


def shared_memory(environment: Mapping[str, str] = os.environ) -> SharedMemory:
    """What the launcher of this node shares with its ranks."""
    try:
        board, arena, parent, silent = environment["PACELINE_SHARED"].split(",")
        return SharedMemory(
            board=int(board), arena=int(arena), parent=int(parent), silent=silent == "1"
        )
    except (KeyError, ValueError):
        raise ConfigError(
            "PACELINE_SHARED is missing or damaged: ranks are started by `paceline train`"
        ) from None


def shared_memory_environment(memory: SharedMemory) -> dict[str, str]:
    """What `shared_memory` reads back."""
    return {
        "PACELINE_SHARED": f"{memory.board},{memory.arena},{memory.parent},{int(memory.silent)}"
    }
