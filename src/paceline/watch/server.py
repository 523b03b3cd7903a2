"""The live page: one file, fed by server-sent events that come from the files of the runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.errors import ConfigError, PacelineError
from paceline.report.page import live
from paceline.schema.plain import parse_json
from paceline.schema.requests import ask
from paceline.serve.door import Listener, loop_factory
from paceline.serve.refusals import RefusalError
from paceline.watch.follow import Follower
from paceline.watch.state import state_of

LOOK_SECONDS = 1.0
MOST_BODY = 4096
"""Bytes of a request: a few settings."""


class Watch:
    """Looks at the runs once a second while somebody watches, and tells what has changed."""

    def __init__(self, runs: Sequence[Follower]) -> None:
        self.runs = runs
        self.closing = asyncio.Event()
        self._parts: dict[str, str] = {}
        self._looked = -LOOK_SECONDS
        self._lock = asyncio.Lock()

    async def parts(self) -> dict[str, str]:
        """Every part of every run as JSON; looked at anew once a second, for all who watch."""
        async with self._lock:
            loop = asyncio.get_running_loop()
            if loop.time() - self._looked >= LOOK_SECONDS:
                self._parts = await loop.run_in_executor(None, self._look)
                self._looked = loop.time()
            return self._parts

    def _look(self) -> dict[str, str]:
        found = {}
        for key, run in enumerate(self.runs):
            run.look()
            for part, data in state_of(run).items():
                found[f"{key}/{part}"] = data
        return found

    async def events(self) -> AsyncIterator[bytes]:
        """All parts at first, then those that changed; a sign of life when nothing did."""
        sent: dict[str, str] = {}
        while not self.closing.is_set():
            parts = await self.parts()
            new = ",".join(
                f"{json.dumps(name)}:{data}"
                for name, data in parts.items()
                if sent.get(name) != data
            )
            sent = parts
            yield (f"data: {{{new}}}\n\n" if new else ": nothing new\n\n").encode()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.closing.wait(), LOOK_SECONDS)


def application(watch: Watch, door: Listener) -> Any:
    """The routes, behind the door."""
    text, policy = live()

    async def show(request: Request) -> Response:
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
        return Response(text, media_type="text/html", headers=headers)

    async def events(request: Request) -> Response:
        headers = {"cache-control": "no-store"}
        return StreamingResponse(watch.events(), media_type="text/event-stream", headers=headers)

    async def wish(request: Request) -> Response:
        # Not as a number of the route's: one of thousands of digits would be an error of ours.
        name = request.path_params["key"]
        runs = {str(number): run for number, run in enumerate(watch.runs)}
        if name not in runs:
            raise RefusalError(404, f"there is no run {name[:100]!r}")
        run = runs[name]
        # A page of another site cannot send this type without being asked about it first.
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise RefusalError(415, "a wish is sent as application/json")
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BODY:
                raise RefusalError(413, f"a wish has at most {MOST_BODY:,} bytes")
        try:
            settings = parse_json(body or b"{}")
            if not isinstance(settings, dict):
                raise ConfigError("settings must be a table of keys")
            await watch.parts()  # how far the training is now
            refuse_shorter(run, settings)
            ask(run.run, request.path_params["wish"], settings)
        except (ValueError, PacelineError, OSError) as error:
            raise RefusalError(400, str(error)) from None
        return JSONResponse({"asked": request.path_params["wish"]})

    router = Starlette(
        routes=[
            Route("/", show),
            Route("/api/events", events),
            Route("/api/runs/{key}/{wish}", wish, methods=["POST"]),
        ],
        exception_handlers={RefusalError: _refused},
    )
    access = door.access

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
            try:
                access.admit(headers, is_open=scope["path"] == "/")
            except RefusalError as refusal:
                await _answer(refusal)(scope, receive, send)
                return
        await router(scope, receive, send)

    return guarded


def refuse_shorter(run: Follower, settings: dict[str, Any]) -> None:
    """A run cannot become shorter than it is."""
    epochs = settings.get("train.epochs")
    done = run.progress[-1].epoch if run.progress else 0
    if isinstance(epochs, int) and epochs <= done:
        raise ConfigError(
            f"train.epochs = {epochs}, but {done} are done: ask for {done + 1} or more, or stop it"
        )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    return _answer(error)


def _answer(refusal: RefusalError) -> Response:
    return JSONResponse({"error": refusal.reason}, refusal.status, dict(refusal.headers))


def serve(paths: Sequence[Path], door: Listener, say: Callable[[str], None]) -> None:
    """Show the runs until SIGTERM or Ctrl-C."""
    door.check()
    listening = door.listen()
    with listening, asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve([Follower(path) for path in paths], door, listening, say))


async def _serve(
    runs: Sequence[Follower], door: Listener, listening: socket.socket, say: Callable[[str], None]
) -> None:
    watch = Watch(runs)
    server = uvicorn.Server(door.settings(application(watch, door)))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]

    def stop() -> None:
        watch.closing.set()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    say(f"watching on {door.address(listening)}")
    await server.serve(sockets=[listening])
