"""Gradients summed and weights updated piece by piece, each rank its own pieces.

The parameters that a group of ranks trains together are laid end to end and cut
into as many equal pieces as there are ranks. Every rank publishes the parts of
its gradient that others own, waits once, adds what the others published to its
own pieces, updates them, and waits again. A byte of gradient is written and
read (R-1)/R times, and the update itself is divided by R.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.errors import DivergedError, StrategyError
from paceline.local.base import Job, OptimizerState, StepResult, agree_on_gradients, scale_rate
from paceline.local.finite import DIVERGED, bad_of, is_finite
from paceline.local.gradient_hooks import GradientHooks
from paceline.local.rounded import RoundedWeights
from paceline.local.shared import ABSENT, FULL, HALF, LINE, SharedModel, memory_view, shaped
from paceline.local.steps import divide_by_weight

_UNIT = LINE // 4
COUNTER = "step"
"""The one entry of the optimizers by name that is not as large as its parameter."""
_CHUNK = 196608
"""Elements that are turned into fp32 and added before the next: they stay in the cache."""


@dataclass(frozen=True)
class Piece:
    """Part of one parameter, in its memory order."""

    name: str
    start: int
    end: int


def divide(
    sizes: Sequence[tuple[str, int]], ranks: int, whole: Collection[str] = ()
) -> list[list[Piece]]:
    """Cut parameters, laid end to end, into one list of pieces per rank of equal size.

    Those in `whole` are not cut: the rank has them in whose piece they begin.

    >>> divide([("a", 40), ("b", 24)], 2)[1]
    [Piece(name='a', start=32, end=40), Piece(name='b', start=0, end=24)]
    >>> divide([("a", 40), ("b", 24)], 2, whole=["a"])[1]
    [Piece(name='b', start=0, end=24)]
    """
    total = sum(size for _, size in sizes)
    bounds = [round(total * rank / ranks / _UNIT) * _UNIT for rank in range(ranks)] + [total]
    result: list[list[Piece]] = [[] for _ in range(ranks)]
    at = 0
    for name, size in sizes:
        for rank in range(ranks):
            start, end = max(at, bounds[rank]), min(at + size, bounds[rank + 1])
            if name in whole:
                start, end = (at, at + size) if start == at < end else (at, at)
            if start < end:
                result[rank].append(Piece(name, start - at, end - at))
        at += size
    return result


class PieceUpdate:
    """One rank's part of the update of parameters that a group of ranks trains together."""

    def __init__(
        self,
        shared: SharedModel,
        job: Job,
        *,
        names: Sequence[str],
        group: Sequence[int],
        hooks: GradientHooks,
        rounded: RoundedWeights | None = None,
    ) -> None:
        """`names`: the parameters; `group`: the local ranks that all compute their gradients."""
        self.rounded, self.hooks = rounded, hooks
        self.shared, self.job, self.board = shared, job, shared.board
        self.names, self.group = list(names), list(group)
        sizes = [(name, shared.parameters[name].numel()) for name in names]
        divided = divide(sizes, len(self.group), whole=hooks.names)
        mine = self.group.index(self.board.rank)
        self._own = divided[mine]
        self._foreign: dict[str, list[Piece]] = {name: [] for name in names}
        for owner, pieces in enumerate(divided):
            if owner != mine:
                for piece in pieces:
                    self._foreign[piece.name].append(piece)
        self._weights = [self._slice(shared.weights, piece) for piece in self._own]
        self.optimizer = job.build_optimizer(self._weights) if self._weights else None
        self._others = [rank for rank in self.group if rank != self.board.rank]
        self._published: set[str] = set()
        # What the leader exchanges: in the order of the model, as nodes with one rank do.
        self._exchanged = [
            (shared.place(shared.weights, name), name)
            for name, parameter in shared.parameters.items()
            if parameter.requires_grad and job.exchange is not None
        ]
        self._hooks: list[Any] = []
        self._counted: nn.Parameter | None = None
        if job.exchange is not None:
            weights: list[torch.Tensor] = [weight for weight, _ in self._exchanged]
            if job.step.weighs and job.exchange.adds_up:
                self._counted = nn.Parameter(torch.zeros(1))
                weights.insert(0, self._counted)
            job.exchange.attach(weights)
        # Stages of one row compute one loss, which the last of them has.
        self._alike = len(self.group) == self.board.ranks or not job.step.weighs

    def _slice(self, flat: torch.Tensor, piece: Piece) -> torch.Tensor:
        return self.shared.place(flat, piece.name)[piece.start : piece.end]

    def publish(self, name: str) -> None:
        """Copy to shared memory what other ranks own of a parameter's gradient."""
        self._published.add(name)
        gradient = self._gradient(name)
        if gradient is None:
            self.shared.say_published(name, ABSENT)
            return
        self.shared.say_published(name, HALF if gradient.dtype is torch.bfloat16 else FULL)
        for piece in self._foreign[name]:
            self._place(self.board.rank, piece).copy_(gradient[piece.start : piece.end])

    def _place(self, rank: int, piece: Piece) -> torch.Tensor:
        """Where a rank publishes a piece; if in bf16, then in the first half of its room."""
        place = self._slice(self.shared.gradients(rank), piece)
        if self.shared.published(rank, piece.name) == HALF:
            return place.view(torch.bfloat16)[: piece.end - piece.start]
        return place

    def _gradient(self, name: str) -> torch.Tensor | None:
        """This rank's gradient of a parameter in its memory order, in bf16 if it came as that."""
        parameter = self.shared.parameters[name]
        twin = self.rounded.twins.get(name) if self.rounded else None
        found = parameter.grad
        if twin is not None and twin.grad is not None:
            found = twin.grad if found is None else found + twin.grad
        if found is not None and found.layout is not torch.strided:
            raise StrategyError(
                f"the gradient of {name} is sparse, but ranks of one node add up dense ones: use"
                " local.strategy = 'threads', or make the layer with sparse=False"
            )
        return None if found is None else memory_view(found, parameter)

    def publish_while_computing(self) -> None:
        """From now on, publish each gradient as soon as the backward pass has it."""
        twins = self.rounded.twins if self.rounded else {}
        for name in self.names:
            if self._foreign[name]:
                leaves: list[Any] = [self.shared.parameters[name]]
                leaves += [twins[name]] if name in twins else []
                for leaf in leaves:
                    hook = leaf.register_post_accumulate_grad_hook(
                        lambda _, name=name: self.publish(name)
                    )
                    self._hooks.append(hook)

    @torch.no_grad()
    def round_weights(self) -> None:
        """Bring the rounded weights up to date, each rank its own pieces; every rank calls it."""
        if self.rounded is None:
            return
        if self.job.nodes > 1:  # the leader may only now have taken over what others have
            self.board.barrier("weights before rounding")
        for weight, piece in zip(self._weights, self._own, strict=True):
            if piece.name in self.rounded.twins:
                self._slice(self.shared.rounded, piece).copy_(weight)
        self.board.barrier("rounded weights")

    def close(self) -> None:
        """Let go of the weights: Python does not see a circle that leads through a hook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.hooks.close()
        if self.rounded is not None:
            self.rounded.close()

    @torch.no_grad()
    def step(self, result: StepResult, total: int) -> None:
        """Sum gradients over the group and update; every rank of the node calls it."""
        self.shared.counts[self.board.rank] = result.counted
        for name in self.names:
            if name not in self._published and self._foreign[name]:
                self.publish(name)
        self._published.clear()
        self.board.enter("summing gradients")
        self.board.barrier("gradients", self.group if self._alike else None)
        weighs = self.job.step.weighs
        counted = float(self.shared.counts.sum()) if weighs else float(total)
        for weight, piece in zip(self._weights, self._own, strict=True):
            weight.grad = self._summed(piece)
            if piece.name not in self.hooks.names:  # hooks may put it right
                self._refuse_not_finite(weight.grad, piece)
        if self.job.nodes > 1:
            counted = self._agree_with_other_nodes(counted, result, total)
        divide_by_weight(self._weights, counted, total)
        self._run_hooks()
        with self.job.span("optimizer"):
            self._clip()
            if self.optimizer is not None:
                self.optimizer.step()
        for name in self.names:
            self.shared.parameters[name].grad = None
        for twin in self.rounded.twins.values() if self.rounded else ():
            twin.grad = None
        self.board.barrier("weights")
        if self.job.nodes > 1:
            if self.job.exchange is not None:
                self.job.exchange.after_update()
            self.board.barrier("weights of all nodes")

    def _agree_with_other_nodes(self, counted: float, result: StepResult, total: int) -> float:
        """Sum over nodes what the node has summed: one rank per node is on the network.

        Gives what all gradients together count for.

        The node's sum is put together in the first rank's region: each slice of it was published
        for the rank that now overwrites it, and is read by no other.
        """
        region = self.shared.gradients(0)
        for weight, piece in zip(self._weights, self._own, strict=True):
            place = self._slice(region, piece)
            place.zero_() if weight.grad is None else place.copy_(weight.grad)
        self.board.barrier("node's gradients")
        if self.job.exchange is not None:
            self.board.enter("exchanging gradients")
            for weight, name in self._exchanged:
                weight.grad = self.shared.place(region, name)
            _, everyones = agree_on_gradients(self.job, self._counted, result, counted, total)
            self.shared.counts[0] = everyones
        self.board.barrier("exchange")
        for weight, piece in zip(self._weights, self._own, strict=True):
            weight.grad = self._slice(region, piece)
        return float(self.shared.counts[0])

    def _run_hooks(self) -> None:
        """Let the user's hooks see whole gradients, each on the rank that has all of it."""
        for weight, piece in zip(self._weights, self._own, strict=True):
            if piece.name in self.hooks.names and weight.grad is not None:
                parameter = self.shared.parameters[piece.name]
                changed = self.hooks.run(piece.name, shaped(weight.grad, parameter))
                weight.grad = None if changed is None else memory_view(changed, parameter)
                self._refuse_not_finite(weight.grad, piece)

    def _refuse_not_finite(self, total: torch.Tensor | None, piece: Piece) -> None:
        """Raise before a sum touches weights that it would make useless, and name whose it was."""
        if total is None or is_finite(total):
            return
        senders = [r for r in self._others if self.shared.published(r, piece.name) != ABSENT]
        sent = [(rank, self._place(rank, piece)) for rank in senders]
        bad = [(rank, part) for rank, part in sent if not is_finite(part)]
        rank, part = bad[0] if bad else (self.board.rank, total)
        raise DivergedError(
            f"rank {rank}{' of this node' if self.job.nodes > 1 else ''} has a gradient of"
            f" {piece.name} of which {bad_of(part)} are not finite: {DIVERGED}"
        )

    def _summed(self, piece: Piece) -> torch.Tensor | None:
        """A piece of the gradient, in fp32, over all ranks of the group; None where none has it."""
        gradient, size = self._gradient(piece.name), piece.end - piece.start
        publishing = [r for r in self._others if self.shared.published(r, piece.name) != ABSENT]
        if gradient is None and not publishing:
            return None  # as in one process: the optimizer leaves such a parameter alone
        own = torch.zeros(size) if gradient is None else gradient[piece.start : piece.end]
        total = own if own.dtype is torch.float32 else torch.empty(size)
        parts = (total, own, *(self._place(rank, piece) for rank in publishing))
        for chunk, mine, *others in zip(
            *(torch.split(part, _CHUNK) for part in parts), strict=True
        ):
            if total is not own:
                chunk.copy_(mine)
            for other in others:
                chunk += other
        return total

    def _clip(self) -> None:
        """Shorten the gradient of the whole model, of which this rank sees only pieces."""
        limit = self.job.clip_norm
        if limit is None:
            return
        square = sum(
            float(weight.grad.double().square().sum())
            for weight in self._weights
            if weight.grad is not None
        )
        norm = self.board.sum([square], "clip")[0] ** 0.5
        if norm > limit:
            for weight in self._weights:
                if weight.grad is not None:
                    weight.grad.mul_(limit / (norm + 1e-6))

    def scale_rate(self, factor: float) -> None:
        """The learning rate from now on, relative to the one the optimizer was made with."""
        if self.optimizer is not None:
            scale_rate(self.optimizer, factor)

    def state(self) -> OptimizerState:
        """The whole model's optimizer state, on the first rank; every rank calls it.

        A parameter that never had a gradient has none.
        """
        mine = self._entries()
        notes = self.shared.exchange_notes(sorted({key for entry in mine for key in entry}))
        result: OptimizerState = {}
        for key in sorted({key for note in notes for key in note}):
            held = 0
            for note in self.shared.exchange_notes(f"{self._publish_entry(mine, key):x}"):
                held |= int(note, 16)
            if self.board.rank == 0:
                self._collect_entry(result, key, held)
            self.board.barrier("optimizer state")
        return result

    def _entries(self) -> list[dict[str, torch.Tensor]]:
        """The state of every piece that this rank owns."""
        if self.optimizer is None:
            return []
        return [
            {k: v for k, v in self.optimizer.state[weight].items() if isinstance(v, torch.Tensor)}
            if weight in self.optimizer.state
            else {}
            for weight in self._weights
        ]

    def _publish_entry(self, mine: list[dict[str, torch.Tensor]], key: str) -> int:
        """Put one entry of the pieces this rank owns into the first rank's gradient region.

        A counter fills its piece. A bit for each parameter that has the entry.
        """
        region, held = self.shared.gradients(0), 0
        for entries, piece in zip(mine, self._own, strict=True):
            if key in entries:
                self._slice(region, piece).copy_(entries[key])
                held |= 1 << self.shared.indices[piece.name]
        return held

    def _collect_entry(self, result: OptimizerState, key: str, held: int) -> None:
        region = self.shared.gradients(0)
        for name, parameter in self.shared.parameters.items():
            if not held >> self.shared.indices[name] & 1:
                continue
            found = self.shared.place(region, name)
            if key == COUNTER:
                whole = found[0].clone()
            else:
                whole = torch.empty_like(parameter, requires_grad=False)
                memory_view(whole, whole).copy_(found)
            result.setdefault(name, {})[key] = whole

    def load_state(self, state: OptimizerState) -> None:
        """Take this rank's pieces out of a whole state."""
        if self.optimizer is None:
            return
        for weight, piece in zip(self._weights, self._own, strict=True):
            parameter = self.shared.parameters[piece.name]
            entries = {}
            for key, value in state.get(piece.name, {}).items():
                whole = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                if whole and key != COUNTER:
                    vector = memory_view(value, parameter)
                    entries[key] = vector[piece.start : piece.end].clone()
                else:
                    entries[key] = value.clone() if isinstance(value, torch.Tensor) else value
            if entries:
                self.optimizer.state[weight] = entries
