"""The ranks of a script on one machine: started, listened to, watched, and ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from paceline.config.environment import script_environment
from paceline.errors import UserError
from paceline.launch.rank import die_with_parent
from paceline.launch.scripts import family
from paceline.launch.scripts.counting import rank_cores
from paceline.launch.scripts.output import RankOutput
from paceline.launch.scripts.screen import Memory
from paceline.local.cores import pin
from paceline.run import RunDirectory
from paceline.schema import RankContext, write_json
from paceline.schema.script import RankExit, Script

STOP_SECONDS = 30.0
"""After Ctrl-C, how long ranks have to save what they want to: as long as torchrun gives them."""
TERM_SECONDS = 5.0
"""After another rank has failed, how long ranks have to end when they are told to."""
WORD_SECONDS = 1.5
"""After a first failure that looks like a consequence, how long the cause may still come."""
TURN_SECONDS = 0.5
"""Between two looks at what nothing wakes us for."""
IDLE = 0.01
"""Part of a core that counts as none: threads that wake up now and then use less."""
BEGIN = "paceline.launch.scripts.begin"
"""The module that becomes the script."""
EXIT = "exit.json"
"""File in a rank's folder."""


@dataclass
class _Rank:
    """One process of the script."""

    number: int
    process: subprocess.Popen[bytes]
    output: RankOutput
    started: float
    streams: set[int] = field(default_factory=set)
    code: int | None = None
    ended: float = 0.0
    was_told: bool = False
    """We have told it to end."""
    busy: float = 0.0
    """When it was last seen to use the CPU."""
    cpu: float = 0.0
    is_named: bool = False
    """It was said that it stalls."""


@dataclass(frozen=True, kw_only=True)
class RanksOutcome:
    """How the ranks of one machine ended."""

    exits: tuple[RankExit, ...]
    """In the order in which they ended, as far as they did by themselves."""
    signalled: int | None = None
    """The signal of the user that ended them."""

    @property
    def failed(self) -> tuple[RankExit, ...]:
        """Those that failed by themselves, in the order in which they did."""
        return tuple(end for end in self.exits if end.has_failed)


def _code(pid: int) -> int | None:
    """How a child ended, as `Popen.returncode`; None: it has not.

    It is not reaped: as long as it is not, its number is no other process's.
    """
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


class Supervisor:
    """Starts the ranks of one node and sees to them until all have ended."""

    def __init__(
        self,
        script: Script,
        run: RunDirectory,
        context: RankContext,
        *,
        host: str = "localhost",
        memory: Memory,
        say: Callable[[str], None] = print,
        takes_input: bool = False,
    ) -> None:
        """`context`: the place of this node's first rank. `memory` hears what ranks print."""
        self.script, self.run, self.context, self.host = script, run, context, host
        self._memory, self._say = memory, say
        self._takes_input = takes_input
        self._ranks: list[_Rank] = []
        self._order: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._heeded = 0
        self._told: tuple[int, float] | None = None
        """The last signal that went to all ranks, and when the next one is due."""
        self._failed_at: float | None = None
        self._looked = self._measured = time.monotonic()

    def note_signal(self, number: int, frame: object = None) -> None:
        """The handler of Ctrl-C, SIGTERM and SIGHUP."""
        self._signals.append(number)

    # --- the whole ------------------------------------------------------------

    def watch(self) -> RanksOutcome:
        """Run the script to its end."""
        guard = family.Guard()
        try:
            for local_rank in range(self.context.local_size):
                if self._signals:
                    break
                self._ranks.append(rank := self._start(local_rank))
                guard.add(rank.process.pid)
            while self._turn():
                pass
            return self._outcome()
        finally:
            self._end()
            guard.dismiss()

    def _start(self, local_rank: int) -> _Rank:
        context = dataclasses.replace(
            self.context, rank=self.context.rank + local_rank, local_rank=local_rank
        )
        cores, threads = rank_cores(context.local_size, local_rank)
        folder = self.run.rank(context.rank)
        memory = self._memory
        output = RankOutput(folder, lambda text, error: memory.hear(context.rank, text, error))
        (folder / EXIT).unlink(missing_ok=True)
        node = context.node
        interfaces = self.script.interfaces
        environment = script_environment(
            context,
            name=self.run.path.name,
            threads=threads,
            interface=interfaces[node] if node < len(interfaces) else "",
            error_file=folder / "error.json",
            variables=self.script.variables,
        )
        parent = os.getpid()

        def prepare() -> None:  # between fork and exec, where there is one thread
            die_with_parent(parent)
            pin(cores)

        try:
            process = subprocess.Popen(
                # Lines come as they are printed; a crash in C code shows the Python that led to it.
                [sys.executable, "-u", "-X", "faulthandler", "-m", BEGIN, *self.script.words],
                cwd=self.script.folder,
                env=environment,
                stdin=None if self._takes_input and local_rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Of its own: Ctrl-C reaches us alone, and what it starts can be found.
                start_new_session=True,
                preexec_fn=prepare,
            )
        except OSError as error:
            output.close()
            raise UserError(
                f"rank {context.rank} cannot be started in {self.script.folder}: {error.strerror}"
            ) from None
        now = time.monotonic()
        rank = _Rank(context.rank, process, output, now, busy=now)
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (rank, is_error))
            rank.streams.add(stream.fileno())
        return rank

    def _turn(self) -> bool:
        """Listen a little; False: all ranks have ended."""
        for key, _ in self._selector.select(self._patience()):
            rank, is_error = key.data
            self._read(rank, key.fileobj, is_error)  # type: ignore[arg-type]
        now = time.monotonic()
        for rank in self._ranks:
            if rank.code is None and (code := _code(rank.process.pid)) is not None:
                self._note_end(rank, code, now)
        if all(rank.code is not None for rank in self._ranks):
            return False
        self._heed_signals(now)
        self._see_to_failures(now)
        self._press(now)
        if now - self._looked >= TURN_SECONDS:
            self._look(now)
        return True

    def _patience(self) -> float:
        """Who closes its output may have ended: then its end is near, and else nothing hurries."""
        silent = any(rank.code is None and not rank.streams for rank in self._ranks)
        return 0.01 if silent else 0.05 if self._told or self._failed_at else TURN_SECONDS / 2

    def _read(self, rank: _Rank, stream: IO[bytes], is_error: bool) -> bool:
        """Take what lies in a pipe; whether more may lie there."""
        try:
            data = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if data:
            rank.output.take(data, is_error=is_error)
        else:
            self._forget(rank, stream)
        return bool(data)

    def _forget(self, rank: _Rank, stream: IO[bytes]) -> None:
        self._selector.unregister(stream)
        rank.streams.discard(stream.fileno())
        stream.close()

    def _note_end(self, rank: _Rank, code: int, now: float) -> None:
        """Take its last words, which lie in the pipes; who still holds these is not waited for."""
        for key in [k for k in self._selector.get_map().values() if k.data[0] is rank]:
            while self._read(rank, key.fileobj, key.data[1]):  # type: ignore[arg-type]
                pass
            if key.fd in rank.streams:
                self._forget(rank, key.fileobj)  # type: ignore[arg-type]
        rank.output.close()
        rank.code, rank.ended = code, now
        self._memory.note_end(self._exit(rank))
        self._order.append(rank)
        write_json(self.run.rank(rank.number) / EXIT, self._exit(rank))

    def _exit(self, rank: _Rank) -> RankExit:
        assert rank.code is not None
        return RankExit(
            rank=rank.number,
            host=self.host,
            code=rank.code,
            seconds=round(rank.ended - rank.started, 3),
            ended_by_us=rank.was_told,
        )

    # --- ending ---------------------------------------------------------------

    def _heed_signals(self, now: float) -> None:
        """The first goes to all ranks; the second ends them at once."""
        if len(self._signals) == self._heeded:
            return
        self._heeded = len(self._signals)
        number = self._signals[0]
        if self._heeded == 1:
            self._say(
                f"stopping: the ranks have {STOP_SECONDS:.0f} s; once more to end them at once"
            )
            self._tell(number, now + STOP_SECONDS)
        else:
            self._tell(signal.SIGKILL, now)

    def _see_to_failures(self, now: float) -> None:
        """One rank's failure ends all; where it looks like another's, that one may still speak."""
        failed = [rank for rank in self._order if rank.code and not rank.was_told]
        if not failed or self._told is not None:
            return
        self._failed_at = self._failed_at or now
        if now - self._failed_at > WORD_SECONDS or not all(
            self._memory.is_consequence(rank.number) for rank in failed
        ):
            self._tell(signal.SIGTERM, now + TERM_SECONDS)

    def _tell(self, number: int, next_due: float) -> None:
        self._told = (number, next_due)
        for rank in self._ranks:
            if rank.code is None and _code(rank.process.pid) is None:
                rank.was_told = True
                if number == signal.SIGABRT:  # its stack goes into its log, no core onto the disk
                    with contextlib.suppress(OSError, ValueError):
                        resource.prlimit(rank.process.pid, resource.RLIMIT_CORE, (0, 0))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    def _press(self, now: float) -> None:
        """Who does not end when it is told to says where it is, and is killed."""
        if self._told is None or now < self._told[1] or self._told[0] == signal.SIGKILL:
            return
        number = signal.SIGKILL if self._told[0] == signal.SIGABRT else signal.SIGABRT
        self._tell(number, now + 1.0)

    def _end(self) -> None:
        """Leave nothing behind; what ranks that ended well have left running is said, and stays."""
        sessions = [rank.process.pid for rank in self._ranks]
        if self._ranks and all(rank.code == 0 for rank in self._ranks):
            for rank in self._ranks:
                for pid in family.members([rank.process.pid])[rank.process.pid]:
                    self._say(f"rank {rank.number} has left process {pid} running")
        else:
            family.sweep(sessions)
        for rank in self._ranks:
            rank.process.wait()
        for key in list(self._selector.get_map().values()):
            self._forget(key.data[0], key.fileobj)  # type: ignore[arg-type]
        self._selector.close()

    def _outcome(self) -> RanksOutcome:
        exits = tuple(self._exit(rank) for rank in self._order)
        return RanksOutcome(exits=exits, signalled=self._signals[0] if self._signals else None)

    # --- watching -------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Progress bars, and ranks that do nothing."""
        paused = now - self._looked > 10 * TURN_SECONDS  # we were stopped, and so were they
        self._looked = now
        alive = [rank for rank in self._ranks if rank.code is None]
        for rank in alive:
            rank.output.look()
        self._memory.look()
        limit = self.script.stall_seconds
        elapsed = now - self._measured
        if not limit or self._told is not None or elapsed < limit / 10:
            return
        self._measured = now
        used = family.cpu_seconds([rank.process.pid for rank in alive])
        for rank in alive:
            before, rank.cpu = rank.cpu, used[rank.process.pid]
            if paused or rank.cpu - before > IDLE * elapsed:
                rank.busy = now
            idle = now - max(rank.busy, rank.output.heard)
            if idle < limit:
                rank.is_named = False
            elif not rank.is_named:
                rank.is_named = True
                rank.output.note(_stall_words(idle, family.state_of(rank.process.pid)))


def _stall_words(idle: float, state: str) -> str:
    why = {
        "T": "it is stopped (kill -CONT goes on)",
        "D": "it waits for a disk or a file system",
    }.get(state, "it hangs, or waits for a rank that does; Ctrl-C ends all and keeps their logs")
    return f"no output and no CPU use for {idle:.0f} s: {why}"
