"""Downloads with checksum, several mirrors, and parts that are continued."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from paceline.data.base import DataSpec, Download
from paceline.errors import DataError, shortened

BLOCK = 1 << 18
TIMEOUT_SECONDS = 30.0
# How often one mirror may drop the connection before the next one is tried.
ATTEMPTS = 3

Progress = Callable[[Download, int, int], None]
"""Called with the file, the bytes that are there and the bytes it will have."""


def get(
    spec: DataSpec,
    folder: Path,
    *,
    mirrors: tuple[str, ...] = (),
    progress: Progress = lambda *_: None,
    timeout: float = TIMEOUT_SECONDS,
) -> list[Path]:
    """Download every file of a data set into `folder`; what is there and right is kept.

    `mirrors` are addresses of folders that are asked before the published ones.
    """
    if not spec.downloads:
        raise DataError(f"data set {spec.name!r} is not downloaded: {spec.obtain}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be made ({error.strerror}); choose another folder with --data"
        ) from error
    paths = []
    for file in spec.downloads:
        target = folder / file.file
        if not (target.is_file() and md5_of(target) == file.md5):
            _download(spec, file, target, mirrors, progress, timeout)
        size = target.stat().st_size
        progress(file, size, size)
        paths.append(target)
    return paths


def md5_of(path: Path) -> str:
    """The MD5 sum of a file: what the publishers of these data sets give."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def offline_help(spec: DataSpec, folder: Path) -> str:
    """Which files belong where, for a machine without a network."""
    files = "; ".join(
        f"{file.file} (MD5 {file.md5}) from {file.mirrors[0]}" for file in spec.downloads
    )
    return f"without a network, put these files into {folder}: {files}"


def _download(
    spec: DataSpec,
    file: Download,
    target: Path,
    mirrors: tuple[str, ...],
    progress: Progress,
    timeout: float,
) -> None:
    """Try one mirror after the other; a part that is there is continued."""
    part = target.with_name(f"{target.name}.part")
    failures = []
    for address in [f"{mirror.rstrip('/')}/{file.file}" for mirror in mirrors] + [*file.mirrors]:
        try:
            _from_mirror(address, file, part, progress, timeout)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, OSError) and error.filename == str(part):
                raise DataError(
                    f"{part} cannot be written ({error.strerror}); make room or choose another"
                    " folder with --data"
                ) from error
            failures.append(f"{address}: {_reason(error)}")
            continue
        found = md5_of(part)
        if found == file.md5:
            part.replace(target)
            return
        # A wrong part must not be continued.
        part.unlink()
        failures.append(f"{address}: wrong content (MD5 {found} instead of {file.md5})")
    raise DataError(
        f"{file.file} could not be downloaded ({'; '.join(failures)});"
        f" {offline_help(spec, target.parent)}"
    )


def _from_mirror(
    address: str, file: Download, part: Path, progress: Progress, timeout: float
) -> None:
    """Fetch until the file is complete; a dropped connection is taken up where it broke."""
    for attempt in range(ATTEMPTS):
        before = part.stat().st_size if part.exists() else 0
        try:
            _fetch_rest(address, file, part, progress, timeout)
            return
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and before:
                return  # Nothing is missing; the checksum tells whether it is right.
            raise
        except urllib.error.URLError:
            raise
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.filename == str(part):
                raise
            after = part.stat().st_size if part.exists() else 0
            if attempt + 1 == ATTEMPTS or after == before:
                raise


def _fetch_rest(
    address: str, file: Download, part: Path, progress: Progress, timeout: float
) -> None:
    done = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "paceline"}
    if done:
        headers["Range"] = f"bytes={done}-"
    request = urllib.request.Request(address, headers=headers)
    with contextlib.closing(urllib.request.urlopen(request, timeout=timeout)) as response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            done = 0  # The server sends everything again.
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else file.size
        with part.open("ab" if done else "wb") as out:
            while block := response.read(BLOCK):
                _write(out, block, part)
                done += len(block)
                progress(file, done, total)
        if length and done < total:
            raise http.client.IncompleteRead(b"", total - done)


def _write(out: BinaryIO, block: bytes, part: Path) -> None:
    try:
        out.write(block)
        out.flush()
    except OSError as error:
        # Tells a full disk from a broken connection.
        raise OSError(error.errno, os.strerror(error.errno or 0), str(part)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {shortened(str(error.reason))}"
    if isinstance(error, urllib.error.URLError):
        return f"not reachable ({error.reason})"
    return shortened(" ".join(str(error).split())) or type(error).__name__
