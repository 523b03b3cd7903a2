"""The only reader of environment variables."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import ConfigError, shown
from paceline.schema.rank import RankContext
from paceline.secure.files import read_private, write_private
from paceline.secure.sealing import checked_secret, new_secret
from paceline.text import user_path


def data_root(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Folder with data sets: PACELINE_DATA, or None."""
    value = environment.get("PACELINE_DATA")
    return user_path(value) if value else None


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Folder for what can be made again: PACELINE_CACHE, or the user's cache folder."""
    value = environment.get("PACELINE_CACHE")
    if value:
        return user_path(value)
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def amx_allowed(environment: Mapping[str, str] = os.environ) -> bool:
    """False with PACELINE_AMX=off: AMX is then neither tried, nor described to oneDNN, nor used."""
    value = environment.get("PACELINE_AMX", "auto")
    if value not in ("auto", "off"):
        raise ConfigError(f"PACELINE_AMX = {shown(value)} must be auto or off")
    return value == "auto"


def instruction_limit(environment: Mapping[str, str] = os.environ) -> str | None:
    """The newest instruction set that oneDNN may use, where someone has set one."""
    return environment.get("ONEDNN_MAX_CPU_ISA")


def limit_instructions(name: str) -> None:
    """Keep oneDNN in this process, and in those it starts, to an older instruction set."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = name


def lab_hosts(environment: Mapping[str, str] = os.environ) -> Path | None:
    """hosts.toml of the lab that this process runs in, or None."""
    value = environment.get("PACELINE_LAB_HOSTS")
    return Path(value) if value else None


def rank_context(environment: Mapping[str, str] = os.environ) -> RankContext:
    """This process's place, from what the engine that started it has set."""
    if "PACELINE_RANK" not in environment:
        return RankContext()

    def number(name: str) -> int:
        value = environment.get(name, "")
        if not value.lstrip("-").isdecimal():
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
        # A node that is alone may be joined by others: then its launcher has given it one.
        secret=shared_secret(environment)
        if number("PACELINE_NODES") > 1 or environment.get(SECRET)
        else "",
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
    } | ({SECRET: context.secret} if context.secret else {})


@dataclass(frozen=True, kw_only=True)
class Started:
    """What somebody else's launcher says of this process's place."""

    by: Literal["mpi", "torchrun", "slurm"]
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    address: str | None = None
    """Where a store can be found or made; None: ask MPI."""
    port: int = 0
    has_store: bool = False
    """The launcher itself listens there (torchrun's agent)."""


# Rank, size, local rank, local size: who sets them.
_LAUNCHERS: tuple[tuple[Literal["mpi", "torchrun", "slurm"], tuple[str, str, str, str]], ...] = (
    ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    (
        "mpi",
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    ("mpi", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    ("slurm", ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")),
)


def started_by(environment: Mapping[str, str] = os.environ) -> Started | None:
    """Who started this process, and as which of how many; None when a person did.

    Processes that Paceline itself starts have PACELINE_RANK and are not asked.
    """
    if "PACELINE_RANK" in environment or "PACELINE_AGENT" in environment:
        return None
    for by, (rank, size, local_rank, local_size) in _LAUNCHERS:
        if rank not in environment or size not in environment:
            continue
        if by == "slurm" and "SLURM_STEP_ID" not in environment:
            continue  # the batch script itself: it will start us with srun
        started = Started(
            by=by,
            rank=_number(environment, rank),
            size=_number(environment, size),
            local_rank=_number(environment, local_rank, 0),
            local_size=_number(environment, local_size, 1),
        )
        if by == "torchrun" and "MASTER_ADDR" in environment:
            return dataclasses.replace(
                started,
                address=environment["MASTER_ADDR"],
                port=_number(environment, "MASTER_PORT", 29500),
                has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        if by == "slurm":
            return _with_slurm_store(started, environment)
        return started
    return None


def _with_slurm_store(started: Started, environment: Mapping[str, str]) -> Started:
    """Without MPI the first host of the step listens, on a port that follows from the job."""
    names = expand_nodes(environment.get("SLURM_STEP_NODELIST") or "localhost")
    job = _number(environment, "SLURM_JOB_ID", 0) * 16 + _number(environment, "SLURM_STEP_ID", 0)
    return dataclasses.replace(started, address=names[0], port=20000 + job % 10000)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    # "2(x3)" is how Slurm writes "2 on each of 3 hosts".
    value = environment.get(name, "").partition("(")[0].partition(",")[0]
    if not value and default is not None:
        return default
    if not value.isdecimal():
        raise ConfigError(f"{name} = {value!r} must be a whole number: the launcher sets it")
    return int(value)


def expand_nodes(text: str) -> list[str]:
    """Host names from Slurm's short form.

    >>> expand_nodes("a[1-2,07],login")
    ['a1', 'a2', 'a07', 'login']
    """
    names: list[str] = []
    for word in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", text):
        stem, _, ranges = word.partition("[")
        if not ranges:
            names.append(stem)
            continue
        for part in ranges.rstrip("]").split(","):
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                names.append(f"{stem}{number:0{len(first)}d}")
    return names


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A Slurm allocation that this process stands in."""

    job: str
    hosts: tuple[str, ...]
    tasks: int


def slurm_allocation(environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """The allocation, where `srun` would use it without asking for another."""
    job = environment.get("SLURM_JOB_ID")
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not job or not nodes:
        return None
    hosts = tuple(expand_nodes(nodes))
    return Allocation(job=job, hosts=hosts, tasks=_number(environment, "SLURM_NTASKS", len(hosts)))


AGENT_VARIABLES = (
    "PACELINE_DATA",
    "PACELINE_CACHE",
    "PACELINE_AMX",
    "ONEDNN_MAX_CPU_ISA",
    "PYTHONPATH",
)
"""What an agent needs of the launcher's environment: ssh gives a fresh one."""


def passed_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The launcher's variables that its agents are to have."""
    return {name: environment[name] for name in AGENT_VARIABLES if name in environment}


def use_variables(variables: Mapping[str, str]) -> None:
    """Take over what the launcher passes on."""
    os.environ.update({name: variables[name] for name in AGENT_VARIABLES if name in variables})


def java_home(environment: Mapping[str, str] = os.environ) -> str | None:
    """Where Java is, for Spark, where someone has said it."""
    return environment.get("JAVA_HOME") or None


def spark_python(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The Python of Spark's workers: as someone has said, else this one's path."""
    return {"PYSPARK_PYTHON": environment.get("PYSPARK_PYTHON") or sys.executable}


SECRET = "PACELINE_SECRET"
"""By which processes of one run prove to each other that they belong to it."""


def take_secret() -> str:
    """The secret, which is then gone from this process's environment and that of its children."""
    return os.environ.pop(SECRET, "")


def shared_secret(environment: Mapping[str, str] = os.environ) -> str:
    """PACELINE_SECRET, or the key in the user's cache folder, which only the user can read.

    For processes that no launcher of ours has started: hosts with one home folder have the same.
    """
    if given := environment.get(SECRET, ""):
        return checked_secret(given)
    path = cache_root(environment) / "secret"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".secret-{new_secret()[:16]}")
        write_private(new, new_secret())
        with contextlib.suppress(FileExistsError):
            os.link(new, path)  # whole, or not at all: another process may do the same
        new.unlink()
    return checked_secret(read_private(path))


def agent_node(environment: Mapping[str, str] = os.environ) -> int | None:
    """Which node an agent is, by whoever started it."""
    names = ("PACELINE_NODE", "RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
    for name in (*names, "SLURM_PROCID"):
        if name in environment:
            return _number(environment, name)
    return None


def local_place(environment: Mapping[str, str] = os.environ) -> int:
    """Which of its host's processes this is, as torchrun counts."""
    return _number(environment, "LOCAL_RANK", 0)


def agent_process(environment: Mapping[str, str] = os.environ) -> int:
    """The agent that started this process."""
    return _number(environment, "PACELINE_AGENT", os.getppid())


def handed_board(environment: Mapping[str, str] = os.environ) -> int | None:
    """Descriptor of the board on which the agent of this node looks; None: nobody does."""
    value = environment.get("PACELINE_BOARD", "")
    return int(value) if value.isdecimal() else None


REPORT_ROOM = "PACELINE_REPORT"
"""By which an agent tells its node where to leave word of a failure that no disk takes."""


def take_report() -> int | None:
    """Descriptor of that memory, which children of this process do not have."""
    value = os.environ.pop(REPORT_ROOM, "")
    return int(value) if value.isdecimal() else None


QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Torch warns of hosts without a name, and that all parameters were used; what fails raises."""


def child_environment(
    changes: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Of a process that an agent or the launcher starts: this one's, with changes."""
    return {**environment, **changes}


def visible_devices(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names; None: everything that is there."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [name.strip() for name in value.split(",")]


SHARES = "PACELINE_SHARES"
"""By which `paceline run` tells ranks the shares of their hosts in hosts.toml."""


def given_shares(environment: Mapping[str, str] = os.environ) -> list[float] | None:
    """The share of every rank, where someone has said it."""
    value = environment.get(SHARES)
    if not value:
        return None
    try:
        return [float(word) for word in value.split(",")]
    except ValueError:
        raise ConfigError(
            f"{SHARES} = {shown(value)} must be numbers with commas between"
        ) from None


def named_variables(
    words: Iterable[str], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What `--env NAME` and `--env NAME=VALUE` say, and the number of threads where it is set."""
    found = {name: environment[name] for name in ("OMP_NUM_THREADS",) if environment.get(name)}
    for word in words:
        name, given, value = word.partition("=")
        if not given and name not in environment:
            raise ConfigError(f"--env {shown(word)}: there is no such variable here: add =VALUE")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"--env {shown(word)} must be NAME or NAME=VALUE")
        found[name] = value if given else environment[name]
    return found


_OWN = (
    "PACELINE_RANK", "PACELINE_WORLD_SIZE", "PACELINE_LOCAL_RANK", "PACELINE_LOCAL_SIZE",
    "PACELINE_NODE", "PACELINE_NODES", "PACELINE_ADDRESS", "PACELINE_PORT", "PACELINE_BACKEND",
    "PACELINE_AGENT", "PACELINE_BOARD", "PACELINE_SHARED",
)  # fmt: skip
"""By which processes of a training of ours know their place: a script's rank is none of them."""
_OF_THE_AGENT = ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")
"""What an agent sets for a training of ours."""


def script_environment(
    context: RankContext,
    *,
    name: str,
    threads: int,
    interface: str,
    error_file: Path,
    variables: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Of a rank of the user's own script: what torch 2.13's elastic agent would set.

    `variables` go before this process's environment, which goes before what is only sensible.
    """
    own = (*_OWN, *(_OF_THE_AGENT if "PACELINE_AGENT" in environment else ()))
    if not environment.get("OMP_NUM_THREADS"):
        own = (*own, "OMP_NUM_THREADS")  # set to nothing is not set
    kept = {key: value for key, value in environment.items() if key not in own}
    sensible = {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # A host's own name often leads to an address that the others cannot reach.
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
        **({SECRET: context.secret} if context.secret else {}),
    }
    place = {
        "RANK": context.rank,
        "WORLD_SIZE": context.world_size,
        "LOCAL_RANK": context.local_rank,
        "LOCAL_WORLD_SIZE": context.local_size,
        "GROUP_RANK": context.node,
        "GROUP_WORLD_SIZE": context.nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": context.rank,
        "ROLE_WORLD_SIZE": context.world_size,
        "MASTER_ADDR": context.address,
        "MASTER_PORT": context.port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": name,
        # The first rank itself holds the store: no launcher of torch's listens for it.
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    return {**sensible, **kept, **variables, **{key: str(each) for key, each in place.items()}}


def inherited_descriptors(environment: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Descriptors that MPICH hands down: a child that is to be the MPI rank needs them."""
    value = environment.get("PMI_FD", "")
    return (int(value),) if value.isdecimal() else ()


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
