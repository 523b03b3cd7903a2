"""BatchNorm of a divided batch is that of the whole batch, in float64 to the last digits."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.errors import StrategyError
from paceline.local.batch_norm import WholeBatch, refuse_own_forward, use_plain_synchronised
from paceline.local.part_sums import LeftAloneError, ThreadSums

KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "1d, sequences": (lambda: nn.BatchNorm1d(3), (3, 5)),
    "2d": (lambda: nn.BatchNorm2d(3), (3, 4, 4)),
    "3d": (lambda: nn.BatchNorm3d(3), (3, 2, 2, 2)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(3), (3, 4, 4)),
    "no momentum": (lambda: nn.BatchNorm2d(3, momentum=None), (3, 4, 4)),
    "no weights": (lambda: nn.BatchNorm2d(3, affine=False), (3, 4, 4)),
    "no running statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (3,)),
}


def model_of(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Identity(), layer, nn.Tanh()).double().train()


def in_parts(
    model: nn.Module, inputs: torch.Tensor, sizes: list[int]
) -> tuple[list[nn.Module], list[torch.Tensor | None], list[BaseException]]:
    """One update's passes with a thread for every part; what became of each."""
    sums = ThreadSums(len(sizes), deadline=60.0, nodes=None)
    whole, replicas = WholeBatch(sums), [copy.deepcopy(model) for _ in sizes]
    gradients: list[torch.Tensor | None] = [None] * len(sizes)
    faults: list[BaseException] = []

    def run(number: int, part: torch.Tensor) -> None:
        try:
            with sums.part(number):
                if not len(part):
                    whole.join(replicas[number])
                    return
                leaf = part.clone().requires_grad_()
                with whole.update(replicas[number]):
                    outputs = replicas[number](leaf)
                    (outputs**3).sum().backward()
                gradients[number] = leaf.grad
        except Exception as error:
            faults.append(error)

    threads = [
        threading.Thread(target=run, args=pair) for pair in enumerate(torch.split(inputs, sizes))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replicas, gradients, faults


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[4, 3], [1, 6, 0], [0, 2, 1]], ids=str)
def test_parts_are_normalised_like_the_whole(kind: str, sizes: list[int]) -> None:
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    plain = model_of(make())
    # A mean that is large beside the deviation, where sums of squares lose digits.
    inputs = 100 + torch.randn(sum(sizes), *shape, dtype=torch.float64) * 0.1
    model = copy.deepcopy(plain)
    use_plain_synchronised(model)
    replicas, gradients, faults = in_parts(model, inputs, sizes)
    assert not faults
    leaf = inputs.clone().requires_grad_()
    (plain(leaf) ** 3).sum().backward()
    found = torch.cat([gradient for gradient in gradients if gradient is not None])
    torch.testing.assert_close(found, leaf.grad, rtol=1e-7, atol=1e-9)
    for replica in replicas:
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(replica.state_dict()[name], tensor, rtol=1e-9, atol=1e-9)
    for parameters in zip(plain.parameters(), *(r.parameters() for r in replicas), strict=True):
        total = sum(each.grad for each in parameters[1:] if each.grad is not None)
        torch.testing.assert_close(total, parameters[0].grad, rtol=1e-7, atol=1e-9)


def test_evaluation_mode_is_left_alone() -> None:
    model = model_of(nn.BatchNorm2d(3))
    model[1].eval()
    inputs = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    replicas, gradients, faults = in_parts(model, inputs, [3, 2])
    assert not faults
    leaf = inputs.clone().requires_grad_()
    (model(leaf) ** 3).sum().backward()
    torch.testing.assert_close(torch.cat(gradients), leaf.grad)
    assert all(torch.equal(replicas[0].state_dict()[n], t) for n, t in before.items())


def test_one_value_per_channel_in_all_parts_is_refused_as_in_torch() -> None:
    _, _, faults = in_parts(model_of(nn.BatchNorm1d(3)), torch.randn(1, 3).double(), [1, 0])
    told = [fault for fault in faults if not isinstance(fault, LeftAloneError)]
    assert len(told) == 1
    assert "more than 1 value per channel" in str(told[0])


class Wayward(nn.Module):
    """Takes another way where the first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first, second = (self.one, self.other) if inputs[0, 0] > 0 else (self.other, self.one)
        return second(first(inputs))


def test_another_order_of_layers_is_refused_in_a_sentence() -> None:
    inputs = torch.ones(6, 3, dtype=torch.float64)
    inputs[3:] = -1
    _, _, faults = in_parts(Wayward().double(), inputs, [3, 3])
    assert faults
    assert all("in the same order" in str(f) for f in faults if not isinstance(f, LeftAloneError))
    assert any(isinstance(fault, StrategyError) for fault in faults)


class OwnForward(nn.BatchNorm1d):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs - inputs.mean(0)) * self.weight


def test_a_forward_of_its_own_is_refused() -> None:
    refuse_own_forward(nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3)))
    with pytest.raises(StrategyError, match=r"1 \(OwnForward\).*local_batch_norm"):
        refuse_own_forward(nn.Sequential(nn.Linear(3, 3), OwnForward(3)))
