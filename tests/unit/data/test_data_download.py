"""Downloads from a real server on loopback: whole, continued, wrong, missing, unreachable."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paceline.commands.data import command
from paceline.data import DataSpec, Download
from paceline.data.download import get, md5_of
from paceline.errors import DataError

CONTENT = bytes(range(256)) * 3000
MD5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT with ranges; the first part of the path says how it misbehaves."""

    ranges: list[str | None]

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)  # type: ignore[attr-defined]
        if kind == "missing":
            self.send_error(404)
            return
        body = CONTENT if kind != "wrong" else CONTENT[:-1] + b"!"
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted).group(1)) if wanted else 0  # type: ignore[union-attr]
        if kind == "norange":
            start = 0
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        rest = body[start:]
        # Drops the connection in the middle, each time it is asked.
        self.wfile.write(rest[:300_000] if kind == "drops" else rest)

    def log_message(self, *arguments: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []

    def address(self, kind: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{kind}/file.bin"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.02,))
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def closed_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/file.bin"


def spec_of(*mirrors: str) -> DataSpec:
    file = Download(file="file.bin", md5=MD5, size=len(CONTENT), mirrors=mirrors)
    return DataSpec(
        name="thing",
        summary="a thing",
        image_size=None,
        channels=None,
        classes=None,
        obtain="get it",
        downloads=(file,),
    )


def test_whole_download_with_progress_and_kept_afterwards(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    spec = spec_of(server.address("good"))
    (path,) = get(spec, tmp_path / "new", progress=lambda _, *counts: seen.append(counts))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert len(seen) > 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert list(path.parent.iterdir()) == [path]
    get(spec, tmp_path / "new")
    assert len(server.ranges) == 1


def test_a_part_is_continued(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:123_456])
    (path,) = get(spec_of(server.address("good")), tmp_path)
    assert md5_of(path) == MD5
    assert server.ranges == ["bytes=123456-"]


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    (path,) = get(spec_of(server.address("norange")), tmp_path)
    assert md5_of(path) == MD5


def test_a_complete_part_needs_nothing_more(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    (path,) = get(spec_of(server.address("good")), tmp_path)
    assert md5_of(path) == MD5


def test_a_dropped_connection_is_taken_up_again(server: Server, tmp_path: Path) -> None:
    (path,) = get(spec_of(server.address("drops")), tmp_path)
    assert md5_of(path) == MD5
    assert server.ranges == [None, "bytes=300000-", "bytes=600000-"]


def test_wrong_content_is_thrown_away_and_the_next_mirror_asked(
    server: Server, tmp_path: Path
) -> None:
    wrong = spec_of(server.address("wrong"))
    with pytest.raises(DataError, match=r"wrong content \(MD5 [0-9a-f]{32} instead of") as caught:
        get(wrong, tmp_path)
    assert f"put these files into {tmp_path}: file.bin (MD5 {MD5})" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    (path,) = get(spec_of(server.address("wrong"), server.address("good")), tmp_path)
    assert md5_of(path) == MD5


def test_a_damaged_file_in_place_is_downloaded_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"damaged")
    (path,) = get(spec_of(server.address("good")), tmp_path)
    assert md5_of(path) == MD5


def test_missing_and_unreachable_are_both_named(server: Server, tmp_path: Path) -> None:
    closed = closed_address()
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    with pytest.raises(DataError) as caught:
        get(spec_of(server.address("missing"), closed), tmp_path, timeout=5)
    text = str(caught.value)
    assert "missing/file.bin: HTTP 404 Not Found" in text
    assert f"{closed}: not reachable (" in text
    assert "without a network, put these files into" in text
    assert "\n" not in text
    # What was there can still be continued when the network is back.
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:1000]


def test_a_folder_that_cannot_be_made(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="choose another folder"):
        get(spec_of(server.address("good")), tmp_path / "file" / "data")


# The command


def run(*arguments: str, data: Path | None = None, cache: Path) -> Result:
    environment = {"PACELINE_CACHE": str(cache), "PACELINE_DATA": str(data or "")}
    return CliRunner().invoke(command, arguments, env=environment)


def test_get_command_from_a_mirror(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.spec", lambda name: spec_of(closed_address()))
    mirror = server.address("good").removesuffix("/file.bin")
    result = run("get", "mnist", "--data", str(tmp_path / "d"), "--mirror", mirror, cache=tmp_path)
    assert result.exit_code == 0, result.output
    assert "checksums right" in result.output
    assert (tmp_path / "d" / "mnist" / "file.bin").read_bytes() == CONTENT
    # Without a data folder the files go where opening looks for them.
    result = run("get", "mnist", "--mirror", mirror, cache=tmp_path / "c")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "c" / "data" / "mnist" / "file.bin").is_file()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["get", "mnits"], "did you mean 'mnist'"),
        (["get", "digits"], "comes with the scikit-learn"),
        (["nothing"], "unknown data set 'nothing'"),
        (["digits", "--data", "/does/not/exist"], "does not exist"),
        (["cifar10"], "paceline data get cifar10"),
    ],
)
def test_command_mistakes(tmp_path: Path, arguments: list[str], text: str) -> None:
    result = run(*arguments, cache=tmp_path)
    assert isinstance(result.exception, DataError)
    assert text in str(result.exception)


def test_list_and_show(tmp_path: Path) -> None:
    (tmp_path / "data" / "pets" / "cat").mkdir(parents=True)
    table = run(data=tmp_path / "data", cache=tmp_path / "cache")
    assert table.exit_code == 0, table.output
    assert "pets" in table.output
    listed = json.loads(run("--json", data=tmp_path / "data", cache=tmp_path / "cache").output)
    here = {row["name"]: row["here"] for row in listed["data"]}
    assert here == {
        "digits": True,
        "mnist": False,
        "cifar10": False,
        "image_folder": True,
        "synthetic": True,
        "pets": True,
    }
    shown = run("digits", cache=tmp_path / "cache")
    assert shown.exit_code == 0, shown.output
    assert "1,438" in shown.output
    facts = json.loads(run("digits", "--json", cache=tmp_path / "cache").output)
    assert facts["sample_shape"] == [1, 28, 28]
    assert sum(facts["train"]["per_class"].values()) == facts["train"]["samples"] == 1438
    assert len(facts["fingerprint"]) == 32
