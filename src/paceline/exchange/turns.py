"""Sums that a thread of ours carries out, one bucket after the other, under the backward pass."""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable

import torch

from paceline.exchange.base import ExchangeSetting, Summing
from paceline.exchange.network import Network

CLOSE_SECONDS = 5.0


class Turns:
    """A thread that does one thing after the other, in the order in which they were asked for."""

    def __init__(self, name: str) -> None:
        self._name = f"paceline-{name}"
        self._turns: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def begin(self, network: Network, work: Callable[[], None]) -> Turn:
        """Have `work` done when it is its turn."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        turn = Turn(network, work)
        self._turns.put(turn)
        return turn

    def _serve(self) -> None:
        while (turn := self._turns.get()) is not None:
            try:
                if self._failure is not None:  # the nodes are no longer in step
                    raise self._failure
                with torch.no_grad():
                    turn.work()
            except BaseException as error:  # raised again where someone waits
                self._failure = turn.error = error
            finally:
                turn.end()
            # The last reference to a gradient must not live on in this frame.
            del turn

    def close(self) -> None:
        if self._thread is not None:
            self._turns.put(None)
            # Messages have the network's deadline: after a failure the thread may outlast this.
            self._thread.join(CLOSE_SECONDS)
            self._thread = None


class InTurn(Summing):
    """An exchange written out on messages: one thread runs the buckets in their order.

    The order is the same on every node, so that messages and sums of two buckets never mix.
    """

    def __init__(self, setting: ExchangeSetting) -> None:
        super().__init__(setting)
        self._turns = Turns(self.name)

    @abstractmethod
    def carry_out(self, flat: torch.Tensor, number: int) -> None:
        """Add up bucket `number` over all nodes, in place; called on the thread."""

    def sum(self, flat: torch.Tensor, number: int) -> Turn:
        return self._turns.begin(self.network, lambda: self.carry_out(flat, number))

    def close(self) -> None:
        super().close()
        self._turns.close()


class Turn:
    """One thing that is done in its turn."""

    def __init__(self, network: Network, work: Callable[[], None]) -> None:
        self.work = work
        self.error: BaseException | None = None
        self._network = network
        self._over = threading.Event()
        self._started = time.perf_counter()

    def end(self) -> None:
        """Called by the thread."""
        self._network.count_time(seconds=time.perf_counter() - self._started)
        self._over.set()

    def wait(self) -> None:
        """Return when the sum is there; raise what went wrong."""
        before = time.perf_counter()
        self._over.wait()
        self._network.count_time(waited=time.perf_counter() - before)
        if self.error is not None:
            raise self.error
