"""The door: sockets, TLS, slow clients, signals; and the watch over the folders."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.errors import ConfigError
from paceline.local.memory import return_large_blocks
from paceline.serve.core import Access, Core, Limits
from paceline.serve.manager import Manager, Options
from paceline.serve.routes import routes
from paceline.serve.source import Source

HEADER_SECONDS = 10.0
"""Until the head of a request must have arrived: who sends a byte a minute is cut off."""
HEADER_BYTES = 64 << 10
"""Of the head of a request."""
SMALLEST_TOKEN = 16
"""Characters: fewer could be guessed."""


@dataclass(frozen=True, kw_only=True)
class Door:
    """Where the server listens, and to whom."""

    host: str = "127.0.0.1"
    port: int = 8500
    token: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    plain: bool = False
    """Without TLS although others can reach it: something before it encrypts."""
    connections: int = 512
    """At once; more are answered with 503."""
    drain: int = 30
    """Seconds for requests under way after SIGTERM."""

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check(self) -> None:
        """Refuse what would let strangers in."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--tls-cert and --tls-key belong together: give both")
        for file in (self.certificate, self.key):
            if file is not None and not file.is_file():
                raise ConfigError(f"there is no file {file}")
        if self.token is not None and len(self.token) < SMALLEST_TOKEN:
            raise ConfigError(f"a token must have {SMALLEST_TOKEN} characters or more")
        if self.is_loopback:
            return
        if self.token is None:
            raise ConfigError(
                f"--host {self.host} can be reached by others: give --token-file with a secret that"
                " they must know, or listen on 127.0.0.1"
            )
        if self.certificate is None and not self.plain:
            raise ConfigError(
                f"--host {self.host} can be reached by others: give --tls-cert and --tls-key, or"
                " --plain where something before it encrypts"
            )


class Cautious(HttpToolsProtocol):
    """Cuts off who takes too long, or too many bytes, for the head of a request."""

    _timer: asyncio.TimerHandle | None = None
    _head = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._timer is not None:
            self._head += len(data)
            before = self._head - len(data)
            super().data_received(data)
            if self._timer is not None and before > HEADER_BYTES:
                self._cut()
            return
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._stop()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._stop()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._cut)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._head = None, 0

    def _cut(self) -> None:
        self._stop()
        self.transport.close()


@dataclass(kw_only=True)
class Server:
    """Everything that `paceline serve` runs."""

    paths: Sequence[Path]
    door: Door
    options: Options
    limits: Limits
    poll: float = 1.0
    """Seconds between two looks at the folders."""
    say: Callable[[str], None] = print
    core: Core | None = field(default=None, init=False)

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C; requests under way are answered."""
        self.door.check()
        return_large_blocks()
        source = Source(self.paths)
        listening = self._listen()
        with listening, asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self._serve(source, listening))

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.door.host else socket.AF_INET
        listening = socket.socket(family)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self.door.host, self.door.port))
            listening.listen(1024)
        except OSError as error:
            listening.close()
            raise ConfigError(
                f"{self.door.host}:{self.door.port} cannot be listened on ({error.strerror}):"
                " choose another --port"
            ) from None
        return listening

    async def _serve(self, source: Source, listening: socket.socket) -> None:
        manager = Manager(self.options, self.say)
        token = self.door.token.encode() if self.door.token else None
        access = Access(token=token, loopback=self.door.is_loopback)
        core = self.core = Core(manager, self.limits, access, routes)
        server = uvicorn.Server(self._settings(core))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        watch = asyncio.create_task(self._watch(source, manager))

        def stop() -> None:
            core.draining = True
            server.should_exit = True

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        scheme = "https" if self.door.certificate else "http"
        host = f"[{self.door.host}]" if ":" in self.door.host else self.door.host
        self.say(f"serving on {scheme}://{host}:{listening.getsockname()[1]}")
        try:
            await server.serve(sockets=[listening])
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await manager.close()
            core.close()
            self.say("all requests are answered; good-bye")

    def _settings(self, core: Core) -> uvicorn.Config:
        door = self.door
        return uvicorn.Config(
            core,
            http=Cautious,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            date_header=False,
            limit_concurrency=door.connections,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=door.drain,
            ssl_certfile=str(door.certificate) if door.certificate else None,
            ssl_keyfile=str(door.key) if door.key else None,
        )

    async def _watch(self, source: Source, manager: Manager) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                found = await loop.run_in_executor(None, source.look)
                if await manager.follow(found):
                    continue
            except OSError as error:
                self.say(f"warning: the folders cannot be looked at: {error}")
            await asyncio.sleep(self.poll)


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
