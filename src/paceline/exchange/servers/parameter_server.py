"""`parameter_server`: nodes that compute nothing hold the weights; workers push and pull."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import UnsupportedError
from paceline.exchange.agreement import take_bytes
from paceline.exchange.base import Beginning, Exchange, ExchangeSetting
from paceline.exchange.buckets import Buckets, bounds
from paceline.exchange.seed import make_seed
from paceline.exchange.servers.client import Served
from paceline.exchange.servers.shard import whole_state
from paceline.exchange.servers.sharding import shard_bounds
from paceline.exchange.turns import InTurn
from paceline.exchange.wire import Kind, Request
from paceline.local.shared import divided, memory_view


class ParameterServer(InTurn):
    """A worker's part: its gradient goes to the servers, which answer with weights.

    The gradient leaves in buckets while the backward pass still runs.

    Gradients are weighted with their samples over the global batch, in every mode. The
    asynchronous pushes of all workers for one global batch so add up to the one update of
    synchronous training at the same rate. (Adam takes a step of full length at each push.)
    """

    name = "parameter_server"
    summary = "dedicated servers hold shards of the weights: sync (Sandblaster), async (Downpour)"

    def __init__(self, setting: ExchangeSetting) -> None:
        super().__init__(setting)
        if not isinstance(setting.network, Served):
            raise UnsupportedError(
                "exchange.kind = 'parameter_server' needs nodes that serve: train it on two hosts"
                " or more"
            )
        self.served = setting.network
        options = setting.options
        self._every = options.every if options.mode == "async" else 1
        self._request = Request(kind=Kind.PUSH)
        self._accrued = 0
        self._samples = 0

    @property
    def adds_up(self) -> bool:
        """Servers answer with weights, and know of nothing but them."""
        return False

    def attach(self, weights: Sequence[torch.Tensor]) -> None:
        Exchange.attach(self, weights)
        elements = sum(weight.numel() for weight in weights)
        self._gradient, self._flat = torch.zeros(elements), torch.empty(elements)
        options = self.setting.options
        capacity = int(options.bucket_mb * 2**20)
        self._bounds = bounds(self._weights, capacity)
        shards = shard_bounds(elements, len(self.served.servers))
        self._parts = [self._flat[start:end] for start, end in shards]
        if self._every == 1:  # else gradients are added up first
            self._buckets = Buckets(
                self._weights,
                self.sum,
                capacity=capacity,
                overlap=self.setting.overlap and options.overlap,
                returns=False,
            )

    def carry_out(self, flat: torch.Tensor, number: int) -> None:
        """Send a bucket; in memory it has its last weight first, servers have the first one."""
        assert self._buckets is not None
        first = self._bounds[number][1]
        for weight, part in divided(flat, self._buckets.groups[number]):
            first -= weight.numel()
            self._gradient[first : first + weight.numel()].copy_(part)
        with self.served.uncounted():  # its time is counted where training waits for it
            if number == 0:
                self.served.begin_push(self._request, len(self._gradient))
            self.served.push(self._gradient, *self._bounds[number])

    @torch.no_grad()
    def start(self, beginning: Beginning) -> int:
        """The first worker tells the servers what all begin with; the others take it over."""
        seeds = []
        if self.served.rank == 0:
            servers = len(self.served.servers)
            seeds = [
                make_seed(
                    beginning.named,
                    beginning.optimizer,
                    beginning.update,
                    number=number,
                    servers=servers,
                )
                for number in range(servers)
            ]
            seeds[0].rest = beginning.rest_bytes()
        update, rest = self.served.hello(self._parts, beginning.model, seeds)
        if len(rest):
            take_bytes(beginning.rest, rest)
        self._unpack()
        return update

    def begin(self, *, update: int, rate: float, samples: int, total: int) -> None:
        """What is said of the next gradient."""
        self._samples += samples
        self._request = Request(
            kind=Kind.PUSH, update=update, rate=rate, samples=self._samples, total=total
        )

    @torch.no_grad()
    def finish(self) -> bool:
        if self._buckets is not None:
            self._buckets.finish()
            self._end_push()
            return False
        self._add_up()
        if self._accrued < self._every:
            return True  # until the next push the node follows its own gradients
        self._push()
        return False

    def _add_up(self) -> None:
        for weight, place in divided(self._gradient, self._weights):
            gradient = None if weight.grad is None else memory_view(weight.grad, weight)
            if self._accrued:
                if gradient is not None:
                    place.add_(gradient)
            elif gradient is None:
                place.zero_()
            else:
                place.copy_(gradient)
        self._accrued += 1

    def _push(self) -> None:
        self.served.begin_push(self._request, len(self._gradient))
        for first, last in self._bounds:
            self.served.push(self._gradient, first, last)
        self._end_push()

    def _end_push(self) -> None:
        self.served.end_push(self._parts)
        self._accrued = self._samples = 0
        self._unpack()

    def _unpack(self) -> None:
        for weight, part in divided(self._flat, self._weights):
            memory_view(weight.data, weight).copy_(part)

    @torch.no_grad()
    def before_evaluation(self) -> None:
        if self._accrued:
            self._push()
        elif self.served.asynchronous:
            self.served.pull(self._parts)
            self._unpack()

    @torch.no_grad()
    def optimizer_state(
        self, named: Sequence[tuple[str, torch.Tensor]]
    ) -> dict[str, dict[str, Any]]:
        """The servers' optimizer state by parameter; the weights become those that belong to it."""
        state = whole_state(named, self.served.state(self._parts))
        self._unpack()
        return state
