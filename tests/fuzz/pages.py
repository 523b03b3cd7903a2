"""Targets for what browsers ask: the live page of runs, and the server of models, over ASGI.

Whatever is asked is answered, and never with an error of the server's own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import urllib.parse
from pathlib import Path
from typing import Any

import mutations
from readers import FaultError, Random, Target, _prepare_run, _version, nothing
from safetensors.torch import save_file

from paceline.schema import write_json
from paceline.schema.checkpoint import sum_of

WISHES = ("stop", "checkpoint", "settings")
SETTINGS = {"train.epochs": 5, "train.until.accuracy": 0.9, "train.until.hours": 1.5}


async def asked(
    app: Any, method: str, path: str, headers: dict[str, str], body: bytes
) -> tuple[int, bytes]:
    """The status and the beginning of what an application answers."""
    name, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": urllib.parse.unquote(name), "raw_path": name.encode(),
        "query_string": query.encode(), "root_path": "", "server": ("127.0.0.1", 8500),
        "client": ("127.0.0.1", 1), "state": {},
        "headers": [(key.encode(), value.encode("latin-1")) for key, value in headers.items()],
    }  # fmt: skip
    pieces = [body[: len(body) // 2], body[len(body) // 2 :]]
    said: list[Any] = []

    async def receive() -> dict[str, Any]:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        said.append(message)

    await app(scope, receive, send)
    status = next((each["status"] for each in said if "status" in each), 0)
    return status, b"".join(each.get("body", b"") for each in said)[:400]


def _damaged_path(random: Random, path: str) -> str:
    if random.randint(0, 3):
        return path
    damaged = mutations.damaged_bytes(random, path.encode()).decode("latin-1")
    return "/" + urllib.parse.quote(damaged.lstrip("/"), safe="/%?:")


def _damaged_headers(random: Random, whole: dict[str, str]) -> dict[str, str]:
    found = dict(whole)
    if random.randint(0, 2) == 0:
        name = random.choice(list(found))
        found[name] = mutations.damaged_bytes(random, found[name].encode()).decode("latin-1")
    return found


def _prepare_watch(folder: Path) -> None:
    _prepare_run(folder)
    requests = folder / "runs" / "one" / "requests"
    requests.mkdir()
    (requests / "takes.json").write_text(json.dumps(WISHES))


def _wish(random: Random, folder: Path) -> None:
    """What a browser, or a stranger's page, sends to the live page of a training."""
    from paceline.schema.requests import wished_settings
    from paceline.serve.door import Listener
    from paceline.watch.follow import Follower
    from paceline.watch.server import Watch, application

    follower = Follower(folder / "runs" / "one")
    path = _damaged_path(random, f"/api/runs/0/{random.choice(WISHES)}")
    headers = {"host": "localhost:8500", "content-type": "application/json"}
    body = mutations.damaged_json(random, json.dumps(SETTINGS))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        watch = Watch([follower])
        if scope["path"] == "/api/events":
            watch.closing.set()  # it would be told of what is new for ever
        await application(watch, Listener())(scope, receive, send)

    method = random.choice(("POST", "POST", "POST", "GET", "PUT"))
    work = asked(app, method, path, _damaged_headers(random, headers), body)
    status, said = asyncio.run(work)
    if not 200 <= status < 500:
        raise FaultError(f"status {status}: {said!r}")
    if (follower.run.requests / "settings.json").exists():
        wished_settings(follower.run)  # what was taken is what the training can read
        (follower.run.requests / "settings.json").unlink()


def _wished(random: Random, folder: Path) -> None:
    """What lies in RUN/requests when a training looks for wishes."""
    from paceline.run import RunDirectory
    from paceline.schema.config import Train
    from paceline.schema.requests import taken_by, wished_settings, with_settings

    run = RunDirectory(folder)
    run.requests.mkdir(exist_ok=True)
    takes = run.requests / "takes.json"
    takes.write_bytes(mutations.damaged_json(random, json.dumps(WISHES)))
    if not set(taken_by(run)) <= set(WISHES):
        raise FaultError(f"takes {taken_by(run)}")
    wished = run.requests / "settings.json"
    wished.write_bytes(mutations.damaged_json(random, json.dumps(SETTINGS)))
    with_settings(Train(), wished_settings(run))


def _followed(random: Random, folder: Path) -> None:
    """A run that is looked at while it is written, damaged on the way."""
    from paceline.watch.follow import Follower
    from paceline.watch.state import state_of

    run, whole = folder / "runs" / "one", folder / "whole" / "one"
    names = [str(path.relative_to(whole)) for path in sorted(whole.rglob("*.*")) if path.is_file()]
    name = random.choice([name for name in names if name.endswith((".json", ".jsonl", ".toml"))])
    text = (whole / name).read_text()
    damage = mutations.damaged_json_lines if name.endswith(".jsonl") else mutations.damaged_json
    data = damage(random, text) if not name.endswith(".toml") else text.encode()
    if random.randint(0, 2) == 0:
        data = mutations.damaged_bytes(random, data)
    follower, cut = Follower(run), random.randint(0, len(data))
    try:
        for part in (data[:cut], data):
            (run / name).write_bytes(part)
            follower.look()
            for about in state_of(follower).values():
                json.loads(about)
    except Exception as error:  # nothing stands between this and the page
        raise FaultError(f"{type(error).__name__}: {str(error)[:300]}") from error
    finally:
        (run / name).write_text(text)


# --- the server of models -----------------------------------------------------------


def _prepare_models(folder: Path) -> None:
    from paceline import models
    from paceline.schema.version import Architecture

    version = folder / "models" / "digits" / "1"
    version.mkdir(parents=True)
    model = models.build("shallow_cnn", classes=2, channels=1, image_size=16)
    save_file(model.state_dict(), version / "model.safetensors")
    whole = _version()
    about = dataclasses.replace(
        whole,
        signature=dataclasses.replace(whole.signature, shape=(1, 16, 16), pictures=None),
        network=Architecture(name="shallow_cnn", classes=2),
        files={"model.safetensors": sum_of(version / "model.safetensors")},
    )
    write_json(version / "version.json", about)


def _requests(random: Random, folder: Path) -> None:
    """A few requests to a server that has a model."""
    asyncio.run(_ask_server(random, folder / "models"))


async def _ask_server(random: Random, models: Path) -> None:
    from paceline.serve.core import Core, Limits
    from paceline.serve.door import Access
    from paceline.serve.manager import Manager, Options
    from paceline.serve.routes import routes
    from paceline.serve.source import ModelSource

    manager = Manager(Options(batch=2), lambda text: None)
    core = Core(manager, Limits(body=1 << 20, samples=64), Access(), routes)
    try:
        await manager.follow(ModelSource([models]).look())
        for _ in range(REQUESTS):
            method, path, whole = random.choice(ROUTES)
            body = mutations.damaged_json(random, json.dumps(whole)) if whole else b""
            headers = {"host": "localhost:8500", "content-length": str(len(body))}
            if random.randint(0, 3) == 0:
                headers["x-request-timeout"] = random.choice(("1", "nan", "-1", "1e400", "x"))
            headers = _damaged_headers(random, headers)
            answer = asked(core, method, _damaged_path(random, path), headers, body)
            status, said = await asyncio.wait_for(answer, HANG)
            if not 200 <= status < 500:
                raise FaultError(f"status {status} of {path}: {said!r}")
        method, path, whole = ROUTES[0]
        headers = {"host": "localhost:8500"}
        status, said = await asked(core, method, path, headers, json.dumps(whole).encode())
        if status != 200:
            raise FaultError(f"a good request after bad ones: status {status}, {said!r}")
    finally:
        await manager.close()
        core.close()


REQUESTS = 60
"""That one server is asked: loading the model is most of what this costs."""
HANG = 25.0
"""Seconds for an answer: less than what a target has."""
ROUTES = (
    ("POST", "/v1/models/digits:predict", {"instances": [[[[0.0] * 16] * 16]]}),
    ("POST", "/v1/models/digits/versions/1:classify", {"examples": [{"input": [0.0] * 256}]}),
    ("POST", "/v2/models/digits/infer", {
        "inputs": [
            {"name": "input", "datatype": "FP32", "shape": [1, 1, 16, 16], "data": [0.0] * 256}
        ]
    }),
    ("GET", "/v1/models/digits", {}),
    ("GET", "/v1/models/digits/versions/1/metadata", {}),
    ("GET", "/v1/models/digits/labels/stable", {}),
    ("GET", "/v2/models/digits/versions/1", {}),
    ("GET", "/v2/models/digits/ready", {}),
    ("GET", "/metrics", {}),
    ("GET", "/openapi.json", {}),
)  # fmt: skip


def pages() -> list[Target]:
    """All of these."""
    return [
        Target("watch: wishes", _prepare_watch, _wish),
        Target("watch: requests", nothing, _wished),
        Target("watch: a run", _prepare_run, _followed),
        Target("serve: requests", _prepare_models, _requests),
    ]
