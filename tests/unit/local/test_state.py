"""Optimizers of one's own go on exactly, whatever they keep and wherever they keep it."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.errors import RunDirectoryError
from paceline.local.packing import can_pack, pack, unpack
from paceline.local.state import WHOLE, OwnOptimizer, unsaved_sentence
from paceline.training.checkpoint import Checkpoints, Position, TrainState

Base = torch.optim.Optimizer


class InGroups(Base):
    """The rate is learned and lies in the group, as in Prodigy; an average's weight too."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "d": 1e-3, "k": 0, "past": (), "none": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1.1
            group["past"] = (*group["past"], {"d": group["d"]})
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * group["d"] * group["k"])


class OnItself(Base):
    """Counts on the object."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.count = 0
        self.seen: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.seen.append(1 / self.count)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] * sum(self.seen))


class MixedState(Base):
    """Numbers, None, nested lists, tensors of other types and a key that is no parameter."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared = self.state["shared"]
        shared["total"] = shared.get("total", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"n": 0, "none": None, "past": [torch.zeros((), dtype=torch.float64)]}
                    state["sum"] = torch.zeros(p.shape, dtype=torch.float64)
                    state["mask"] = torch.ones(p.shape, dtype=torch.bool)
                state["n"] += 1
                state["past"].append(state["past"][-1] + 1 / 3)
                state["sum"] += p.grad.double() / 3
                state["mask"] ^= p.grad > 0
                factor = float(state["past"][-1]) * state["n"] / shared["total"]
                p.sub_((state["sum"] * state["mask"] * group["lr"] * factor).to(p.dtype))


class Extra(torch.optim.SGD):
    """Adds to its state_dict."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr, momentum=0.5)
        self._pace = torch.tensor(1.0)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pace": self._pace.clone()}

    def load_state_dict(self, state_dict: Any) -> None:
        self._pace = state_dict["pace"].clone()
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "pace"})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._pace = self._pace * 1.25
        self.param_groups[0]["lr"] = 0.1 * float(self._pace)
        super().step()


class Hidden(Base):
    """Keeps tensors where nobody finds them."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.average = torch.zeros(3)
        self.parameters = self.param_groups[0]["params"]  # changes, but is saved as the weights

    def step(self, closure: Any = None) -> None:
        self.average += 1


OPTIMIZERS: dict[str, Callable[..., Base]] = {
    "groups": InGroups,
    "object": OnItself,
    "state": MixedState,
    "extra": Extra,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "sparse_adam": torch.optim.SparseAdam,
}


def make(
    kind: Callable[..., Base], dtype: torch.dtype, *, sparse: bool
) -> tuple[nn.Module, Base, OwnOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 3), nn.Linear(3, 3))
    if sparse:
        del model[1:]
    model = model.to(dtype)
    optimizer = kind(list(model.parameters()), lr=0.1)
    return model, optimizer, OwnOptimizer(optimizer, list(model.named_parameters()))


def update(model: nn.Module, optimizer: Base, number: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 + number)
    hidden = model[0](torch.tensor([number % 9, 2]))
    for layer in list(model)[1 : 3 if number > 2 else 2]:  # the last has no gradient at first
        hidden = layer(hidden)
    hidden.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_on_as_if_never_interrupted(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    sparse = name == "sparse_adam"
    whole, optimizer, _ = make(OPTIMIZERS[name], dtype, sparse=sparse)
    for number in range(6):
        update(whole, optimizer, number)
    model, first, own = make(OPTIMIZERS[name], dtype, sparse=sparse)
    for number in range(2):
        update(model, first, number)
    checkpoints = Checkpoints(tmp_path, keep=1)
    state = own.read()
    assert unsaved_sentence(state) is None
    path = checkpoints.save(TrainState(position=Position(update=2)), model.state_dict(), state)
    _, weights, loaded = checkpoints.load(path)
    again, second, own = make(OPTIMIZERS[name], dtype, sparse=sparse)
    again.load_state_dict(weights)
    own.write(loaded)
    for number in range(2, 6):
        update(again, second, number)
    for (key, expected), found in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(expected, found), key


def test_what_no_checkpoint_holds_is_named() -> None:
    model, optimizer, own = make(Hidden, torch.float32, sparse=False)
    assert own.read()[WHOLE]["unsaved"] == []
    update(model, optimizer, 0)
    sentence = unsaved_sentence(own.read())
    assert sentence is not None
    assert "Hidden keeps average outside of its state_dict" in sentence


def test_another_optimizer_is_refused() -> None:
    model, _, own = make(InGroups, torch.float32, sparse=False)
    state = own.read()
    parts = [{"params": list(layer.parameters())} for layer in model]
    other = OwnOptimizer(InGroups(parts), list(model.named_parameters()))
    with pytest.raises(RunDirectoryError, match="has 3 groups of parameters"):
        other.write(state)


def test_values_come_back_as_they_were() -> None:
    values = [
        *(None, True, 3, 2**70, 0.1, float("inf"), "text", 1 + 2j, torch.bfloat16),
        [1, (2, [3.5, {"a": (None,)}])], {1: "x", (2, 3): []}, OrderedDict(b=1, a=2), {1, 2},
        deque([1, 2], maxlen=3), np.float32(0.1), np.int64(7),
    ]  # fmt: skip
    for value in values:
        back = unpack(pack(value, {}), {})
        assert back == value
        assert type(back) is type(value)
    assert unpack(pack(values[-3], {}), {}).maxlen == 3
    tensors: dict[str, torch.Tensor] = {}
    sparse = torch.sparse_coo_tensor([[1, 1]], [0.1, 0.2], [4], check_invariants=True)
    complexes = torch.randn(3, dtype=torch.complex128).conj()
    packed = pack({"s": [sparse], "c": complexes}, tensors)
    back = unpack(packed, copy.deepcopy(tensors))
    assert torch.equal(back["c"], complexes.resolve_conj())
    assert back["s"][0]._nnz() == 2
    assert torch.equal(back["s"][0].to_dense(), sparse.to_dense())
    assert not can_pack(object())
    assert not can_pack([lambda: 3])
