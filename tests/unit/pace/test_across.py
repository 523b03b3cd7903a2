"""Losses that look across the samples of a batch: a table of those that do, and that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline.errors import ConfigError
from paceline.pace.across import Across, fixed_factors, looks_across
from paceline.pace.factors import differ

ROWS, WIDE, CLASSES = 6, 5, 4
Loss = Callable[["Net"], torch.Tensor]
ACCEPTED: dict[str, Loss] = {}
REFUSED: dict[str, Loss] = {}
COUNTED: dict[str, Loss] = {}
"""They take counts of a rank's part, as ranks see by each other's."""
UNSEEN: dict[str, Loss] = {}
"""They look across samples, and nobody can tell by their graph."""


def accepted(loss: Loss) -> Loss:
    ACCEPTED[loss.__name__] = loss
    return loss


def refused(loss: Loss) -> Loss:
    REFUSED[loss.__name__] = loss
    return loss


def unseen(loss: Loss) -> Loss:
    UNSEEN[loss.__name__] = loss
    return loss


def counted(loss: Loss) -> Loss:
    COUNTED[loss.__name__] = loss
    return loss


class Net(nn.Module):
    """Layers of all kinds, and a batch for each."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        torch.manual_seed(rows)
        self.rows = rows
        self.vectors = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, WIDE))
        self.other = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, WIDE))
        self.scores = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.score = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1))
        self.pixels = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
        self.steps = nn.LSTM(7, 6)
        self.words = nn.Linear(6, CLASSES)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.centres = nn.Parameter(torch.randn(CLASSES, WIDE))
        self.classes = torch.arange(rows) % CLASSES
        self.pairs = torch.arange(rows) // 2
        self.batches: list[torch.Tensor] = []

    def x(self) -> torch.Tensor:
        return torch.randn(self.rows, 7)

    def z(self) -> torch.Tensor:
        return self.vectors(self.x())

    def images(self) -> torch.Tensor:
        return self.pixels(torch.randn(self.rows, 3, 4, 4))

    def sequences(self) -> torch.Tensor:
        """Time first."""
        return self.words(self.steps(torch.randn(9, self.rows, 7))[0])


# --- sums over samples --------------------------------------------------------


@accepted
def cross_entropy(net: Net) -> torch.Tensor:
    return functional.cross_entropy(net.scores(net.x()), net.classes)


@accepted
def label_smoothing(net: Net) -> torch.Tensor:
    return functional.cross_entropy(net.scores(net.x()), net.classes, label_smoothing=0.1)


@accepted
def class_weights(net: Net) -> torch.Tensor:
    weights = torch.arange(1.0, 1 + CLASSES)
    return functional.cross_entropy(net.scores(net.x()), net.classes, weights)


@accepted
def nll(net: Net) -> torch.Tensor:
    return functional.nll_loss(net.scores(net.x()).log_softmax(1), net.classes)


@accepted
def focal(net: Net) -> torch.Tensor:
    each = functional.cross_entropy(net.scores(net.x()), net.classes, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


@accepted
def mse(net: Net) -> torch.Tensor:
    return functional.mse_loss(net.z(), torch.randn(net.rows, WIDE))


@accepted
def mae(net: Net) -> torch.Tensor:
    return functional.l1_loss(net.z(), torch.randn(net.rows, WIDE))


@accepted
def huber(net: Net) -> torch.Tensor:
    return functional.huber_loss(net.z(), torch.randn(net.rows, WIDE), delta=0.3)


@accepted
def smooth_l1(net: Net) -> torch.Tensor:
    return functional.smooth_l1_loss(net.z(), torch.randn(net.rows, WIDE))


@accepted
def bce(net: Net) -> torch.Tensor:
    return functional.binary_cross_entropy(net.score(net.x()).sigmoid(), torch.ones(net.rows, 1))


@accepted
def kl_batchmean(net: Net) -> torch.Tensor:
    targets = torch.randn(net.rows, CLASSES).softmax(1)
    outputs = net.scores(net.x()).log_softmax(1)
    return functional.kl_div(outputs, targets, reduction="batchmean")


@accepted
def ctc(net: Net) -> torch.Tensor:
    lengths = torch.full((net.rows,), 9), torch.full((net.rows,), 3)
    targets = torch.randint(1, CLASSES, (net.rows, 3))
    return functional.ctc_loss(net.sequences().log_softmax(2), targets, *lengths)


@accepted
def cosine_embedding(net: Net) -> torch.Tensor:
    signs = torch.ones(net.rows)
    signs[::2] = -1
    return functional.cosine_embedding_loss(net.z(), net.z(), signs)


@accepted
def triplets_of_its_own(net: Net) -> torch.Tensor:
    return functional.triplet_margin_loss(net.z(), net.z(), net.z(), margin=0.5)


@accepted
def hinge_of_its_own_pairs(net: Net) -> torch.Tensor:
    return functional.margin_ranking_loss(
        net.score(net.x()), net.score(net.x()), torch.ones(net.rows, 1), margin=0.1
    )


@accepted
def multi_margin(net: Net) -> torch.Tensor:
    return functional.multi_margin_loss(net.scores(net.x()), net.classes)


@accepted
def best_class(net: Net) -> torch.Tensor:
    return (1 - net.scores(net.x()).max(dim=1).values).relu().mean()


@accepted
def judge(net: Net) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(net.score(net.x()), torch.ones(net.rows, 1))


@accepted
def judge_of_made(net: Net) -> torch.Tensor:
    made = torch.cat((net.z(), net.z()[:, :2]), dim=1)
    return functional.softplus(-net.score(made)).mean() + (made - 1).abs().mean()


@accepted
def wasserstein_with_gradient_penalty(net: Net) -> torch.Tensor:
    real, made = net.x(), torch.cat((net.z(), net.z()[:, :2]), dim=1).detach()
    between = (0.3 * real + 0.7 * made).requires_grad_()
    (slope,) = torch.autograd.grad(net.score(between).sum(), between, create_graph=True)
    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    return net.score(made).mean() - net.score(real).mean() + 10 * penalty


@accepted
def gradient_penalty_alone(net: Net) -> torch.Tensor:
    inputs = net.x().requires_grad_()
    (slope,) = torch.autograd.grad(net.score(inputs).sum(), inputs, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


@accepted
def masked_mean(net: Net) -> torch.Tensor:
    mask = torch.arange(net.rows) < 4
    return (functional.cross_entropy(net.scores(net.x()), net.classes, reduction="none") * mask
            ).sum() / mask.sum()  # fmt: skip


@accepted
def chosen_by_mask(net: Net) -> torch.Tensor:
    each = functional.mse_loss(net.z(), torch.zeros(net.rows, WIDE), reduction="none")
    return each[torch.arange(net.rows) < 4].mean()


@accepted
def weights_of_samples(net: Net) -> torch.Tensor:
    each = (net.z() - torch.randn(net.rows, WIDE)).square().mean(dim=1)
    return (torch.rand(net.rows) * each).sum()


@accepted
def time_first(net: Net) -> torch.Tensor:
    scores = net.sequences().flatten(0, 1)
    return functional.cross_entropy(scores, torch.zeros(len(scores)).long())


@accepted
def batch_first(net: Net) -> torch.Tensor:
    scores = net.sequences().transpose(0, 1)
    return functional.cross_entropy(scores.flatten(0, 1), torch.zeros(9 * net.rows).long())


@accepted
def of_whole_sequences(net: Net) -> torch.Tensor:
    chances = net.sequences().log_softmax(2)[..., 0].sum(dim=0)
    return -functional.logsigmoid(chances + 9).mean()


@accepted
def flattened_tokens(net: Net) -> torch.Tensor:
    return functional.cross_entropy(
        net.scores(torch.randn(net.rows * 8, 7)), torch.zeros(net.rows * 8).long()
    )


@accepted
def flattened_pooled(net: Net) -> torch.Tensor:
    """Rows of one sample may depend on each other."""
    return net.vectors(torch.randn(net.rows * 2, 7)).view(net.rows, 2, -1).mean(1).square().mean()


@accepted
def ragged_pooled(net: Net) -> torch.Tensor:
    nodes = net.vectors(torch.randn(net.rows * 2, 7))
    owner = torch.tensor([0] * net.rows + list(range(net.rows)))
    return torch.zeros(net.rows, WIDE).index_add(0, owner, nodes).square().mean()


@accepted
def vae(net: Net) -> torch.Tensor:
    mean, log = net.z(), net.other(net.x())
    drawn = mean + torch.randn_like(log) * (log / 2).exp()
    made = net.score(torch.cat((drawn, drawn[:, :2]), dim=1))
    return functional.binary_cross_entropy_with_logits(
        made, torch.ones(net.rows, 1), reduction="sum"
    ) - 0.5 * torch.sum(1 + log - mean**2 - log.exp())


@accepted
def pixels(net: Net) -> torch.Tensor:
    return functional.cross_entropy(net.images(), torch.zeros(net.rows, 4, 4).long())


@accepted
def dice_of_each_sample(net: Net) -> torch.Tensor:
    chances, truth = net.images().softmax(1)[:, 1].flatten(1), torch.rand(net.rows, 16).round()
    return (1 - 2 * (chances * truth).sum(1) / (chances.sum(1) + truth.sum(1) + 1)).mean()


@accepted
def centres(net: Net) -> torch.Tensor:
    return (net.z() - net.centres[net.classes]).square().sum(dim=1).mean()


@accepted
def cosine_of_classes(net: Net) -> torch.Tensor:
    scores = functional.normalize(net.z()) @ functional.normalize(net.centres).t()
    return functional.cross_entropy(net.scale.exp() * scores, net.classes)


@accepted
def penalty_on_weights(net: Net) -> torch.Tensor:
    return cross_entropy(net) + sum(each.square().sum() for each in net.parameters()).sqrt()


@accepted
def predicts_the_other_view(net: Net) -> torch.Tensor:
    return -functional.cosine_similarity(net.z(), net.other(net.x()).detach()).mean()


@accepted
def pair_of_views_in_one_call(net: Net) -> torch.Tensor:
    one, other = net.vectors(torch.randn(2 * net.rows, 7)).chunk(2)
    return -functional.cosine_similarity(one, other).mean()


@accepted
def shifted_by_the_largest_of_all(net: Net) -> torch.Tensor:
    """Nothing is left of it in the sum, but rounding."""
    scores = 20 * net.scores(net.x())
    return functional.cross_entropy(scores - scores.max(), net.classes)


@accepted
def at_least_zero(net: Net) -> torch.Tensor:
    return mse(net).clamp(min=0) + mse(net).abs()


@accepted
def normalised_in_the_model(net: Net) -> torch.Tensor:
    """By layers, groups or instances: of each sample."""
    images = functional.instance_norm(net.images())
    return functional.group_norm(images, 1).square().sum(dim=(1, 2, 3)).tanh().mean()


@accepted
def carried_out_twice(net: Net) -> torch.Tensor:
    found = checkpoint(net.vectors, net.x(), use_reentrant=False)
    return checkpoint(lambda z: z.exp().square(), found, use_reentrant=False).mean()


@accepted
def in_half_precision(net: Net) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return cross_entropy(net) + mse(net)


@accepted
def in_double_precision(net: Net) -> torch.Tensor:
    return net.double().vectors(net.x().double()).exp().mean()


@accepted
def of_complex_numbers(net: Net) -> torch.Tensor:
    return torch.fft.fft(net.z(), dim=1).abs().square().mean()


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        return inputs.square().mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (inputs,) = ctx.saved_tensors
        return gradient * 2 * inputs / inputs.numel()


@accepted
def function_of_ones_own(net: Net) -> torch.Tensor:
    return Once.apply(net.z())  # type: ignore[no-any-return]


@accepted
def changed_in_place(net: Net) -> torch.Tensor:
    z = 2 * net.z()
    z[:, 0] *= 2
    z.clamp_(min=-1)
    return z.square().add_(1).log().mean()


@accepted
def not_finite(net: Net) -> torch.Tensor:
    return (net.z().mean() * float("inf")).square()


# --- across samples -----------------------------------------------------------


def similar(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return functional.normalize(one) @ functional.normalize(other).t() / 0.2


@refused
def info_nce(net: Net) -> torch.Tensor:
    return functional.cross_entropy(similar(net.z(), net.other(net.x())), torch.arange(net.rows))


@refused
def clip(net: Net) -> torch.Tensor:
    scores = net.scale.exp() * similar(net.z(), net.other(net.x()))
    own = torch.arange(net.rows)
    return functional.cross_entropy(scores, own) + functional.cross_entropy(scores.t(), own)


@refused
def siglip(net: Net) -> torch.Tensor:
    signs = 2 * torch.eye(net.rows) - 1
    return -functional.logsigmoid(signs * similar(net.z(), net.z())).sum() / net.rows


@refused
def two_views_in_one_call(net: Net) -> torch.Tensor:
    """SimCLR."""
    z = net.vectors(torch.randn(2 * net.rows, 7))
    scores = similar(z, z).masked_fill(torch.eye(2 * net.rows, dtype=torch.bool), -1e9)
    return functional.cross_entropy(scores, torch.arange(2 * net.rows).roll(net.rows))


@refused
def sup_con(net: Net) -> torch.Tensor:
    z = net.z()
    chances = similar(z, z).masked_fill(torch.eye(net.rows, dtype=torch.bool), -1e9).log_softmax(1)
    return -chances[net.pairs[:, None] == net.pairs].mean()


@refused
def contrast_beside_cross_entropy(net: Net) -> torch.Tensor:
    """Of what the last layer was given."""
    hidden = net.z()
    scores = net.score(torch.cat((hidden, hidden[:, :2]), dim=1))
    loss = functional.binary_cross_entropy_with_logits(scores, torch.ones(net.rows, 1))
    own = torch.arange(net.rows)
    return loss + 0.1 * functional.cross_entropy(similar(hidden, hidden), own)


@refused
def dice_over_the_batch(net: Net) -> torch.Tensor:
    chances, truth = net.images().softmax(1)[:, 1], torch.rand(net.rows, 4, 4).round()
    return 1 - 2 * (chances * truth).sum() / (chances.sum() + truth.sum() + 1)


@refused
def hardest_triplets(net: Net) -> torch.Tensor:
    z = net.z()
    same, apart = net.pairs[:, None] == net.pairs, torch.cdist(z, z)
    far = (apart * same).max(dim=1).values
    close = apart.masked_fill(same, 1e9).min(dim=1).values
    return (far - close + 1).relu().mean()


@refused
def triplets_with_negatives_of_the_batch(net: Net) -> torch.Tensor:
    z = net.z()
    return functional.triplet_margin_loss(z, net.other(net.x()), z.roll(1, 0), margin=5.0)


@refused
def balance_of_experts(net: Net) -> torch.Tensor:
    chances = net.scores(net.x()).softmax(dim=1)
    used = functional.one_hot(chances.argmax(dim=1), CLASSES).float().mean(dim=0)
    return cross_entropy(net) + 0.01 * (CLASSES * (used * chances.mean(dim=0)).sum()) ** 2


@refused
def importance_of_experts(net: Net) -> torch.Tensor:
    chances = net.scores(net.x()).softmax(dim=1)
    importance = chances.sum(dim=0)
    scores = chances * net.scores(net.x())
    loss = functional.cross_entropy(scores, net.classes)
    return loss + 0.01 * importance.var() / importance.mean() ** 2


@refused
def vicreg(net: Net) -> torch.Tensor:
    z = net.z()
    return (1 - (z.var(dim=0) + 1e-4).sqrt()).relu().mean() + z.square().mean()


@refused
def barlow_twins(net: Net) -> torch.Tensor:
    one, other = net.z(), net.other(net.x())
    one, other = ((z - z.mean(0)) / z.std(0) for z in (one, other))
    return (one.t() @ other / net.rows - torch.eye(WIDE)).square().sum()


@refused
def squared_mean(net: Net) -> torch.Tensor:
    return net.z().mean() ** 2


@refused
def root_of_mean_square(net: Net) -> torch.Tensor:
    return mse(net).sqrt()


@refused
def small_beside_a_large_one(net: Net) -> torch.Tensor:
    return mse(net) + 1e-3 * net.z().mean(0).square().sum()


@refused
def by_the_largest_of_the_batch(net: Net) -> torch.Tensor:
    each = net.z().square().sum(dim=1)
    return (each / each.max()).mean()


@refused
def softmax_over_samples(net: Net) -> torch.Tensor:
    return -(net.z().softmax(dim=0) * torch.randn(net.rows, WIDE)).sum()


@refused
def correlation(net: Net) -> torch.Tensor:
    scores, truth = net.score(net.x())[:, 0], torch.randn(net.rows)
    return -torch.corrcoef(torch.stack((scores, truth)))[0, 1]


@refused
def cox(net: Net) -> torch.Tensor:
    risk = net.score(net.x())[:, 0]
    return -(risk - risk.logcumsumexp(0)).mean()


@refused
def ranking_of_pairs(net: Net) -> torch.Tensor:
    scores = net.score(net.x())[:, 0]
    return functional.softplus(scores[:, None] - scores).triu(1).mean()


@refused
def ranking_of_pairs_by_hinge(net: Net) -> torch.Tensor:
    scores = net.score(net.x())[:, 0]
    return (scores[:, None] - scores + 0.1).relu().mean()


@refused
def hardest_samples(net: Net) -> torch.Tensor:
    """Online hard example mining."""
    each = functional.cross_entropy(net.scores(net.x()), net.classes, reduction="none")
    return each.topk(3).values.mean()


@refused
def worst_sample(net: Net) -> torch.Tensor:
    return functional.l1_loss(net.z(), torch.zeros(net.rows, WIDE), reduction="none").max()


@refused
def lovasz(net: Net) -> torch.Tensor:
    errors, _ = (1 - net.score(net.x())[:, 0]).sort(descending=True)
    return errors.relu() @ torch.linspace(1, 0, net.rows).square()


@refused
def relativistic_gan(net: Net) -> torch.Tensor:
    real, made = net.score(net.x()), net.score(net.x())
    return functional.softplus(made.mean() - real).mean()


@refused
def matched_distributions(net: Net) -> torch.Tensor:
    """Maximum mean discrepancy."""
    one, other = net.z(), net.other(net.x())
    kernels = [(-torch.cdist(a, b).square()).exp().mean() for a, b in
               ((one, one), (other, other), (one, other))]  # fmt: skip
    return kernels[0] + kernels[1] - 2 * kernels[2]


@refused
def divided_by_what_was_found(net: Net) -> torch.Tensor:
    chances = net.score(net.x()).sigmoid()
    return (chances * net.z().square()).sum() / chances.sum()


@refused
def time_first_means(net: Net) -> torch.Tensor:
    return net.sequences().log_softmax(2).mean(dim=1).exp().mean()


@refused
def contrast_in_half_precision(net: Net) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return clip(net)


@refused
def contrast_in_double_precision(net: Net) -> torch.Tensor:
    z = net.double().vectors(net.x().double())
    return functional.cross_entropy(similar(z, z), torch.arange(net.rows))


@refused
def wide_as_many(net: Net) -> torch.Tensor:
    """As many columns as rows."""
    scores = similar(net.z(), net.other(net.x()))
    return functional.cross_entropy(scores, torch.arange(net.rows))


# --- what is seen where ranks compare their factors ---


@counted
def balance_by_counts(net: Net) -> torch.Tensor:
    """As switch transformers have it."""
    chances = net.scores(net.x()).softmax(dim=1)
    used = functional.one_hot(chances.argmax(dim=1), CLASSES).float().mean(dim=0)
    return cross_entropy(net) + 0.01 * CLASSES * (used * chances.mean(dim=0)).sum()


@counted
def balance_by_product(net: Net) -> torch.Tensor:
    chances = net.sequences().softmax(dim=2)
    noisy = chances + torch.rand_like(chances)
    used = functional.one_hot(noisy.argmax(dim=2), CLASSES).float().mean(dim=(0, 1))
    return chances.mean(dim=(0, 1)) @ used


@counted
def means_of_classes(net: Net) -> torch.Tensor:
    each = (net.z() - net.x()[:, :WIDE]).square().sum(dim=1)
    drawn = torch.randint(0, CLASSES, (net.rows,))
    counts = 1 + torch.bincount(drawn, minlength=CLASSES)
    return (torch.zeros(CLASSES).index_add(0, drawn, each) / counts).mean()


# --- what nobody sees ---------------------------------------------------------


@unseen
def contrast_with_what_was_detached(net: Net) -> torch.Tensor:
    scores = similar(net.z(), net.other(net.x()).detach())
    return functional.cross_entropy(scores, torch.arange(net.rows))


@unseen
def scale_of_the_batch(net: Net) -> torch.Tensor:
    inputs = net.x()
    return net.vectors(inputs).square().mean() / inputs.std()


@unseen
def attention_in_the_model(net: Net) -> torch.Tensor:
    hidden = net.vectors[0](net.x())
    mixed = (hidden @ hidden.t()).softmax(1) @ hidden
    return net.vectors[2](mixed).square().mean()


@unseen
def chosen_by_number(net: Net) -> torch.Tensor:
    each = net.z().abs().mean(dim=1)
    return each[each.argmax()]


@unseen
def bent_as_a_whole(net: Net) -> torch.Tensor:
    return (net.z().mean() - 0.1).abs()


def judged(loss: Loss, rows: int = ROWS) -> bool:
    net = Net(rows)
    weights = {id(each) for each in net.parameters()}
    return looks_across(loss(net), rows, weights, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rows", [ROWS, WIDE, 2, 16])
@pytest.mark.parametrize("name", ACCEPTED)
def test_sums_over_samples_are_accepted(name: str, rows: int) -> None:
    assert not judged(ACCEPTED[name], rows)


@pytest.mark.parametrize("rows", [ROWS, WIDE, 16])
@pytest.mark.parametrize("name", REFUSED)
def test_losses_across_samples_are_refused(name: str, rows: int) -> None:
    assert judged(REFUSED[name], rows)


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_not_seen(name: str) -> None:
    """A change here belongs into docs/own-loop.md."""
    assert not judged(UNSEEN[name])


def test_large_layers_are_left_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.pace.heads.LARGEST", 9 * ROWS * CLASSES - 1)
    net = Net()

    def tokens() -> torch.Tensor:
        return functional.cross_entropy(net.sequences().flatten(0, 1), torch.zeros(9 * ROWS).long())

    def scores() -> torch.Tensor:
        return functional.cross_entropy(net.scores(net.x()), net.classes)

    def look(loss: torch.Tensor) -> bool:
        weights = {id(each) for each in net.parameters()}
        return looks_across(loss, ROWS, weights, torch.Generator().manual_seed(1))

    assert not look(tokens() ** 2)
    assert look(tokens() + scores() ** 2)


def factors(loss: Loss, rows: int) -> list[list[list[float]]]:
    """Of two ranks."""
    found = []
    for rank in range(2):
        net = Net(rows)
        torch.manual_seed(rank)
        weights = {id(each) for each in net.parameters()}
        found.append(fixed_factors(loss(net), rows, weights, torch.Generator().manual_seed(1)))
    return found


@pytest.mark.parametrize("rows", [ROWS, 16])
@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_refused_where_ranks_differ(name: str, rows: int) -> None:
    assert not judged(COUNTED[name], rows)
    assert differ(factors(COUNTED[name], rows))


@accepted
def weights_of_columns(net: Net) -> torch.Tensor:
    return (net.z().square().mean(dim=0) * torch.arange(1.0, 1 + WIDE)).mean()


@pytest.mark.parametrize("rows", [ROWS, WIDE, 2])
@pytest.mark.parametrize("name", [each for each in ACCEPTED if each != "function_of_ones_own"])
def test_sums_over_samples_have_no_factors_of_their_own(name: str, rows: int) -> None:
    assert not differ(factors(ACCEPTED[name], rows))


def test_ranks_are_asked_for_factors_in_the_same_passes() -> None:
    mine, theirs = factors(balance_by_counts, ROWS)
    net, asked = Net(), []

    def gather(found: Any) -> list[Any]:
        asked.append(found)
        return [found, mine]

    across = Across(dict(net.named_parameters()))
    for number in range(1, 9):
        across.refuse_factors(cross_entropy(net), [(ROWS, 12)] if number > 3 else [], gather)
    assert asked == [[], [], [], []]
    across = Across(dict(net.named_parameters()))
    with pytest.raises(ConfigError, match="this rank has 6 of 12"):
        across.refuse_factors(torch.ones(()), [(ROWS, 12)], lambda _: [mine, theirs])


def test_nothing_is_left_of_a_look() -> None:
    """No gradient, no random number, no run of anybody's hooks, and the pass itself as it was."""
    net, hooked = Net(), []
    z = net.z()
    z.register_hook(lambda gradient: hooked.append("tensor"))
    net.vectors.register_full_backward_hook(lambda *_: hooked.append("module"))
    loss = functional.cross_entropy(similar(z, z), torch.arange(ROWS))
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=r"of which this rank has 6 of 13.*Pace\(exact=False\)"):
        Across(dict(net.named_parameters())).refuse(loss, [(ROWS, 13)])
    assert torch.equal(before, torch.get_rng_state())
    assert not hooked
    assert all(each.grad is None for each in net.parameters())
    loss.backward()
    found = {name: each.grad for name, each in net.named_parameters() if each.grad is not None}
    again = Net()
    z = again.z()
    functional.cross_entropy(similar(z, z), torch.arange(ROWS)).backward()
    assert found
    assert all(torch.equal(each, again.get_parameter(name).grad) for name, each in found.items())


def test_passes_of_every_kind_are_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(
        "paceline.pace.across.looks_across", lambda loss, *_: looked.append(loss.grad_fn.name())
    )
    across = Across({})
    for number in range(1, 41):
        across.refuse(torch.ones(3, requires_grad=True).sum(), [(3, 6)])
        if number % 3 == 0:
            across.refuse(torch.ones(3, requires_grad=True).prod(), [(3, 6)])
    assert looked.count("SumBackward0") == 6
    assert looked.count("ProdBackward0") == 4


def test_where_samples_are_not_known_nothing_is_looked_at() -> None:
    net = Net()
    across = Across(dict(net.named_parameters()))
    for sizes in ([], [(1, 2)], [(ROWS, 12), (4, 8)]):
        across.refuse(squared_mean(net), sizes)
    across.rows = ROWS
    with pytest.raises(ConfigError, match="this rank has 6, so"):
        across.refuse(squared_mean(net), [])


def test_a_look_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> bool:
        raise MemoryError

    monkeypatch.setattr("paceline.pace.across.looks_across", fails)
    Across({}).refuse(squared_mean(Net()), [(ROWS, 12)])
