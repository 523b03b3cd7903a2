"""Whether hosts are fit to train together, asked of each before anything is started.

On each host runs `python -m paceline.launch.checks FACTS`: it prints what the host is, waits
for the addresses of the others, tries to reach them, and prints how that went. The launcher
compares. Nothing here imports torch, so a check takes a fraction of a second.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import platform
import socket
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.config.environment import use_variables
from paceline.data import registry
from paceline.data.base import DataRequest
from paceline.errors import PacelineError
from paceline.references import is_reference
from paceline.schema.plain import parse_json
from paceline.text import user_path

PACKAGES = ("paceline", "torch", "numpy", "mpi4py")
_REACH_SECONDS = 5.0


def facts(wanted: dict[str, Any]) -> dict[str, Any]:
    """What this host is, as far as hosts must agree on it."""
    import psutil

    from paceline.launch.scripts.counting import cuda_devices
    from paceline.local.cores import physical_cores, usable_cores, visible_cores

    return {
        "host": platform.node(),
        "versions": {"python": platform.python_version(), **_versions()},
        "mpi": mpi_library(),
        "cores": len(visible_cores()),
        "usable": usable_cores(),
        "physical": len(physical_cores(visible_cores())),
        "devices": cuda_devices(),
        "memory_mb": round(psutil.virtual_memory().total / 1e6),
        "time": time.time(),
        "data": data_fingerprint(wanted),
        "sources": {name: file_hash(name) for name in wanted.get("sources", [])},
        "user": os.getuid(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def mpi_library() -> str | None:
    """Which MPI mpi4py would load, without starting it: "openmpi 5.0.11"."""
    try:
        import mpi4py

        before = mpi4py.rc.initialize, mpi4py.rc.finalize
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize, mpi4py.rc.finalize = before
        text = str(MPI.Get_library_version())
    except (ImportError, RuntimeError, OSError):
        return None
    words = text.replace(",", " ").split()
    if "Open MPI" in text:
        version = next((word.lstrip("v") for word in words if word.startswith("v")), "")
        return f"openmpi {version}".strip()
    if "MPICH" in text:
        version = next((word for word in words if word[:1].isdecimal()), "")
        return f"mpich {version}".strip()
    return " ".join(words[:4])


def data_fingerprint(wanted: dict[str, Any]) -> str:
    """The names and sizes of the data's files, hashed; "none" where it cannot be found.

    Cheap on purpose: what the files hold is checked when they are read.
    """
    name = wanted.get("data")
    if name is None:
        return ""
    request = DataRequest(name=name, root=wanted.get("root"), cache=wanted.get("cache"))
    if is_reference(name):
        return f"own {file_hash(name)}"
    try:
        if not registry.is_here(request):
            return "none"
        place = data_place(request)
    except PacelineError:
        return "none"
    if place is None:
        return f"built in {metadata.version('paceline')}"
    digest = hashlib.sha256()
    for path in sorted(_files_below(place)):
        digest.update(f"{path.relative_to(place)} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def data_place(request: DataRequest) -> Path | None:
    """Where the files of a data set lie; None for one that needs none."""
    if request.name == "mnist":
        from paceline.data.mnist import mnist_folder

        return mnist_folder(request)
    if request.name == "cifar10":
        from paceline.data.cifar10 import cifar10_place

        return cifar10_place(request)
    if request.name == "image_folder":
        return user_path(request.root) if request.root else None
    return None if request.name in registry.names() else registry.find_folder(request)


def _files_below(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    found: list[Path] = []
    for folder, _, names in os.walk(place):
        found += [Path(folder) / name for name in names if not name.startswith(".")]
    return found


def file_hash(reference: str) -> str:
    """A hash of the file that a reference or a path names; "none" where there is none."""
    place = Path(reference.rpartition(":")[0] if is_reference(reference) else reference)
    if is_reference(reference) and place.suffix != ".py":
        return "module"  # found by Python, wherever it is installed
    try:
        return hashlib.sha256(place.read_bytes()).hexdigest()[:16]
    except OSError:
        return "none"


# --- who reaches whom ---------------------------------------------------------


def interface_of(address: str) -> tuple[str, str] | None:
    """Interface and network (as 10.0.0.0/24) that an address of this host belongs to."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and entry.address == address:
                network = ipaddress.ip_interface(f"{address}/{entry.netmask or 32}").network
                return name, str(network)
    return None


def try_reach(address: str, port: int, seconds: float = _REACH_SECONDS) -> dict[str, Any]:
    """Whether a port answers, how fast, and from which address of ours."""
    begin = time.perf_counter()
    try:
        with socket.create_connection((address, port), timeout=seconds) as connection:
            own = str(connection.getsockname()[0])
            return {"seconds": time.perf_counter() - begin, "from": own}
    except OSError as error:
        return {"error": str(error.strerror or error)}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def main(text: str) -> int:
    """Answer the launcher; see the module's own words."""
    wanted = parse_json(text)
    use_variables(wanted.get("variables", {}))
    with socket.create_server(("", 0), backlog=256) as listener:
        found = facts(wanted) | {"port": listener.getsockname()[1], "free_port": free_port()}
        print(json.dumps(found), flush=True)
        asked = sys.stdin.readline()
        if not asked:
            return 1
        peers = parse_json(asked)["peers"]
        reached = {name: try_reach(address, port) for name, address, port in peers}
        sources = [answer["from"] for answer in reached.values() if "from" in answer]
        outside = [source for source in sources if not source.startswith("127.")]
        place = interface_of(outside[0]) if outside else None
        print(json.dumps({"reached": reached, "interface": place}), flush=True)
        # Others may still be trying to reach us: the launcher closes our input when all are done.
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
