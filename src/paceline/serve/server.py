"""The server: the door, signals, and the watch over the folders."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from paceline.local.memory import return_large_blocks
from paceline.serve.core import Core, Limits
from paceline.serve.door import Listener, loop_factory
from paceline.serve.manager import Manager, Options
from paceline.serve.routes import routes
from paceline.serve.source import ModelSource


@dataclass(kw_only=True)
class Server:
    """Everything that `paceline serve` runs."""

    paths: Sequence[Path]
    door: Listener
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
        source = ModelSource(self.paths)
        listening = self.door.listen()
        with listening, asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(self._serve(source, listening))

    async def _serve(self, source: ModelSource, listening: socket.socket) -> None:
        manager = Manager(self.options, self.say)
        core = self.core = Core(manager, self.limits, self.door.access, routes)
        server = uvicorn.Server(self.door.settings(core))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        watch = asyncio.create_task(self._watch(source, manager))

        def stop() -> None:
            core.draining = True
            server.should_exit = True

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        self.say(f"serving on {self.door.address(listening)}")
        try:
            await server.serve(sockets=[listening])
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await manager.close()
            core.close()
            self.say("all requests are answered; good-bye")

    async def _watch(self, source: ModelSource, manager: Manager) -> None:
        loop = asyncio.get_running_loop()
        told: set[Path] = set()
        while True:
            try:
                found = await loop.run_in_executor(None, source.look)
                for path in sorted(source.hidden - told):
                    self.say(f"warning: {path} is not served: another has its name; rename one")
                told = source.hidden
                if await manager.follow(found):
                    continue
            except OSError as error:
                self.say(f"warning: the folders cannot be looked at: {error}")
            await asyncio.sleep(self.poll)
