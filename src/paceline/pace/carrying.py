"""Rows of a batch that a loop carries on to the next: with other shares they would be another's.

A recurrent state has a row for every sample of a rank's part. What a model was given is compared
with what came out of it for earlier batches, by the memory that both lie in. In the first batches
what is computed from an output counts as the output: a copy, a masked or a scaled state.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from paceline.errors import UserError
from paceline.integrations.shares import tensors_in
from paceline.pace.meter import Meter
from paceline.pace.ranks import Ranks
from paceline.training.carried import RUNNING
from paceline.training.shares import rebalanced

NOTEWORTHY = 1.2
"""How much faster than the slowest rank the fastest must be for shares to follow: ranks of one
machine differ by some percent from epoch to epoch."""
ENOUGH = 2
"""Batches that show whether anything is carried from one to the next."""
FOLLOWED = ENOUGH + 1
"""The first batches, in which all that is computed is looked at: one more than show a state."""
_REMEMBERED = 4096
"""Outputs that are looked for: a loop that keeps more of them gives none back."""


class Carrying:
    """Whether a loop carries rows from batch to batch."""

    def __init__(self, batch: Callable[[], int]) -> None:
        """`batch`: the number of the one that is being worked on."""
        self.reason = ""
        """What was seen."""
        self._batch, self._number = batch, 0
        self._earlier: dict[int, StorageWeakRef] = {}
        self._now: dict[int, StorageWeakRef] = {}
        self._models: list[nn.Module] = []
        self._others: set[int] = set()
        """Of those, what came with other shares."""

    def watch(self, model: nn.Module) -> None:
        """See what goes into a model, and what comes out; a loop may call its cells itself."""
        self._models.append(model)
        for each in model.modules():
            if each is model or isinstance(each, nn.RNNBase | nn.RNNCellBase):
                self._hook(each)

    def following(self) -> AbstractContextManager[object]:
        """For the body of a loop: what it computes from outputs is looked for like them."""
        if self._models and self._batch() <= FOLLOWED:
            return _Computed(self._follow)
        return nullcontext()

    def _follow(self, given: Any, result: Any) -> None:
        self._turn()
        numbers = {each.untyped_storage()._cdata for each in _with_memory(given)}
        if not self._earlier.keys().isdisjoint(numbers):
            self._remember(result, self._earlier)
        elif not self._now.keys().isdisjoint(numbers):
            self._remember(result, self._now)

    def _hook(self, module: nn.Module) -> None:
        compiled: Any = module._compiled_call_impl
        if compiled is None:
            module.register_forward_pre_hook(self._goes_in, with_kwargs=True)
            module.register_forward_hook(lambda _, __, output: self._comes_out(output))
            return

        def call(*words: Any, **named: Any) -> Any:  # hooks would become a part of the graph
            self._goes_in(module, words, named)
            output = compiled(*words, **named)
            self._comes_out(output)
            return output

        module._compiled_call_impl = call

    def _turn(self) -> None:
        """Forget, with a new batch, what nobody holds any more."""
        if self._number == self._batch():
            return
        self._number = self._batch()
        every = itertools.chain(self._earlier.items(), self._now.items())
        known = [(number, each) for number, each in every if not each.expired()]  # type: ignore[no-untyped-call]
        self._earlier = dict(known[-_REMEMBERED:])
        self._others &= self._earlier.keys()
        self._now = {}

    def _goes_in(self, _: nn.Module, words: Any, named: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._turn()
        if not self._earlier:
            return
        given = {each.untyped_storage()._cdata for each in _with_memory((words, named))}
        if not self._others.isdisjoint(given):
            raise UserError(
                "the loop gives a model what came of a batch before shares changed, rows of"
                " another rank: fix the shares, as Pace(shares=[1] * ranks)"
            )
        if not self._earlier.keys().isdisjoint(given):
            self.reason = "the loop gives a model what came of an earlier batch"

    def held(self) -> str:
        """Of what models hold besides parameters and statistics, which may be a state of samples:
        the same on ranks that hold the same."""
        content = hashlib.sha256()
        for module in (module for model in self._models for module in model.modules()):
            buffers = {k: v for k, v in module._buffers.items() if k not in RUNNING}
            for each in _with_memory(vars(module) | {"_buffers": buffers}):
                plain = each.detach().cpu().resolve_conj().resolve_neg()
                flat = plain.contiguous().view(-1).view(torch.uint8)
                content.update(f"{each.dtype} {list(each.shape)}".encode())
                content.update(flat.numpy().data)
        return content.hexdigest()

    def compare(self, held: Sequence[str]) -> None:
        """What ranks hold that have worked on the same batches."""
        if len(set(held)) > 1 and not self.reason:
            self.reason = "a model holds tensors that are others on every rank"

    def divided(self) -> None:
        """Ranks have other rows from now on."""
        self._others = {*self._earlier, *self._now}

    def _comes_out(self, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._remember(output, self._now)

    @staticmethod
    def _remember(output: Any, where: dict[int, StorageWeakRef]) -> None:
        for each in _with_memory(output):
            found = StorageWeakRef(each.untyped_storage())  # type: ignore[no-untyped-call]
            where[found.cdata] = found


class _Computed(TorchFunctionMode):
    """Tells what every function of torch was given, and what came of it."""

    def __init__(self, tell: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, function: Any, types: Any, words: Any = (), named: Any = None
    ) -> Any:
        result = function(*words, **(named or {}))
        if not torch.compiler.is_compiling():
            written = words[0] if result is None and words else None  # state[rows] = outputs
            self._tell((words, named), (result, written))
        return result


def _with_memory(value: Any) -> Iterator[torch.Tensor]:
    """Tensors that lie somewhere; parameters are none, nor what stands for other tensors."""
    for each in tensors_in(value):
        while torch._C._functorch.is_functorch_wrapped_tensor(each):  # inside of vmap, grad, jvp
            each = torch._C._functorch.get_unwrapped(each)
        if type(each) is torch.Tensor and each.layout is torch.strided and not each.is_meta:
            yield each


class Following:
    """Shares that follow the measured speeds of ranks, as long as no rank must keep its rows."""

    def __init__(self, ranks: Ranks, meter: Meter, say: Callable[[str], None]) -> None:
        self._ranks, self._meter, self._say = ranks, meter, say
        self.carrying = Carrying(lambda: meter.working.handed)
        self._stays = False

    def fairer(self, shares: list[float]) -> list[float] | None:
        """Those of the next epoch, if they are other ones; every rank calls it."""
        speeds = [float(each) for each in self._ranks.gather(self._meter.speed)]
        changed = rebalanced(shares, speeds)
        if changed is None or max(speeds) <= NOTEWORTHY * min(speeds) or self._stays:
            return None
        if self._meter.working.handed < ENOUGH:
            return None
        self.carrying.compare(self._ranks.gather(self.carrying.held()))
        reasons = [reason for reason in self._ranks.gather(self.carrying.reason) if reason]
        if not reasons:
            self.carrying.divided()
            return changed
        self._stays = True
        self._say(f"paceline: shares stay as they are: {reasons[0]}")
        return None
