"""The models: counts, names, shapes, tracing, published figures."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from paceline import models
from paceline.errors import ModelError
from paceline.models import vgg

PUBLISHED = {
    "mnist_cnn": 690_590,
    "shallow_cnn": 431_080,
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
}

# torchvision's names and shapes: first, last and some between.
TORCHVISION = {
    "alexnet": (
        16,
        {
            "features.0.weight": (64, 3, 11, 11),
            "features.3.bias": (192,),
            "features.10.weight": (256, 256, 3, 3),
            "classifier.1.weight": (4096, 9216),
            "classifier.6.bias": (1000,),
        },
    ),
    "vgg16": (
        32,
        {
            "features.0.weight": (64, 3, 3, 3),
            "features.14.weight": (256, 256, 3, 3),
            "features.28.bias": (512,),
            "classifier.0.weight": (4096, 25088),
            "classifier.6.bias": (1000,),
        },
    ),
    "vgg19": (
        38,
        {
            "features.0.weight": (64, 3, 3, 3),
            "features.34.weight": (512, 512, 3, 3),
            "classifier.3.weight": (4096, 4096),
            "classifier.6.bias": (1000,),
        },
    ),
    "resnet18": (
        122,
        {
            "conv1.weight": (64, 3, 7, 7),
            "bn1.running_mean": (64,),
            "layer1.0.conv1.weight": (64, 64, 3, 3),
            "layer2.0.downsample.0.weight": (128, 64, 1, 1),
            "layer4.1.bn2.num_batches_tracked": (),
            "fc.bias": (1000,),
        },
    ),
    "resnet34": (218, {"layer3.5.conv2.weight": (256, 256, 3, 3), "fc.weight": (1000, 512)}),
    "resnet50": (
        320,
        {
            "layer1.0.downsample.0.weight": (256, 64, 1, 1),
            "layer1.0.downsample.1.running_var": (256,),
            "layer2.0.conv2.weight": (128, 128, 3, 3),
            "layer4.2.conv3.weight": (2048, 512, 1, 1),
            "fc.weight": (1000, 2048),
        },
    ),
    "resnet152": (
        932,
        {
            "layer2.7.bn3.weight": (512,),
            "layer3.35.conv2.weight": (256, 256, 3, 3),
            "fc.weight": (1000, 2048),
        },
    ),
}

# Small enough to run every model in this file.
SMALL_SIZE = {"alexnet": 63, "mnist_cnn": 28, "shallow_cnn": 28}
DEEP = ("resnet50", "resnet101", "resnet152")
"""Traced behind `make test-slow`: their blocks are those of the others, many times over."""
SMALL_FIRST = [
    pytest.param(name, marks=pytest.mark.slow) if name in DEEP else name for name in models.names()
]


def on_meta(name: str, **arguments: object) -> nn.Module:
    """A model without memory: enough for counts, names and shapes."""
    known = models.spec(name)
    wanted: dict[str, object] = {"classes": known.classes, "channels": known.channels}
    with torch.device("meta"):
        return models.build(name, **{**wanted, **arguments})  # type: ignore[arg-type]


def test_every_model_is_in_the_tables_above() -> None:
    assert set(models.names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", models.names())
def test_parameters_equal_the_published_count(name: str) -> None:
    counted = sum(parameter.numel() for parameter in on_meta(name).parameters())
    assert counted == PUBLISHED[name]
    assert models.spec(name).published_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", TORCHVISION)
def test_names_and_shapes_equal_torchvision(name: str) -> None:
    number, sample = TORCHVISION[name]
    state = on_meta(name).state_dict()
    assert len(state) == number
    assert {key: tuple(state[key].shape) for key in sample} == sample
    assert list(state)[-1] == ("fc.bias" if name.startswith("resnet") else "classifier.6.bias")


@pytest.mark.parametrize("name", models.names())
def test_any_classes_channels_and_sizes(name: str) -> None:
    known = models.spec(name)
    sizes = (known.minimum_size, known.input_size)
    for size, classes, channels in zip(sizes, (2, 7), (1, 4), strict=True):
        module = on_meta(name, classes=classes, channels=channels, image_size=size)
        output = module(torch.zeros(2, channels, size, size, device="meta"))
        assert output.shape == (2, classes)


@pytest.mark.parametrize(
    "name", [name for name in models.names() if models.spec(name).minimum_size > 1]
)
def test_minimum_size_is_the_smallest_that_works(name: str) -> None:
    known = models.spec(name)
    size = known.minimum_size - 1
    with pytest.raises(ModelError, match=rf"{size}.*{known.minimum_size}.*data\.image_size"):
        on_meta(name, image_size=size)
    if not known.sized:
        with pytest.raises(RuntimeError):
            on_meta(name)(torch.zeros(1, known.channels, size, size, device="meta"))


@pytest.mark.parametrize("name", ["mnist_cnn", "shallow_cnn", "alexnet", "resnet18", "resnet50"])
def test_one_real_step_gives_every_parameter_a_gradient(name: str) -> None:
    size = SMALL_SIZE.get(name, 32)
    module = models.build(name, classes=3, channels=1, image_size=size)
    torch.manual_seed(0)
    output = module(torch.randn(2, 1, size, size))
    assert output.shape == (2, 3)
    nn.functional.cross_entropy(output, torch.tensor([0, 2])).backward()
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key


def test_small_stem_keeps_the_side_of_the_image() -> None:
    module = on_meta("resnet18", channels=1, options={"stem": "small"})
    summary = models.summarise(module, (1, 28, 28))
    shapes = {layer.name: layer.output_shape for layer in summary.layers}
    assert shapes["conv1"] == (64, 28, 28)
    assert shapes["layer1.0.conv1"] == (64, 28, 28)
    assert shapes["layer4.1.conv2"] == (512, 4, 4)
    assert module.state_dict()["conv1.weight"].shape == (64, 1, 3, 3)


def test_initialisation_is_torchvision_s() -> None:
    torch.manual_seed(0)
    module = models.build("resnet18", classes=10, channels=3)
    convolution = module.get_parameter("layer2.0.conv2.weight")
    assert convolution.std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.02)
    assert torch.equal(module.get_parameter("bn1.weight"), torch.ones(64))
    bound = 512**-0.5
    assert module.get_parameter("fc.weight").abs().max().item() == pytest.approx(bound, rel=0.01)
    # All of VGG16 would take seconds; its constructor does this to each of its layers.
    dense, convolution = nn.Linear(500, 500), nn.Conv2d(64, 128, 3)
    for layer in (dense, convolution):
        vgg.initialise(layer)
        assert layer.bias is not None
        assert not layer.bias.any()
    assert dense.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert convolution.weight.std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.02)


def test_dropout_option_reaches_the_layers() -> None:
    for name in ("mnist_cnn", "alexnet", "vgg16"):
        module = on_meta(name, options={"dropout": 0.25})
        rates = {layer.p for layer in module.modules() if isinstance(layer, nn.Dropout)}
        assert rates == {0.25}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("alexnte", {}, "did you mean 'alexnet'"),
        ("alexnet", {"options": {"droput": 0.1}}, "did you mean 'dropout'"),
        ("alexnet", {"options": {"dropout": 1.0}}, "below 1"),
        ("alexnet", {"options": {"dropout": "much"}}, "below 1"),
        ("resnet18", {"options": {"stem": "tiny"}}, "'imagenet' or 'small'"),
        ("shallow_cnn", {"options": {"dropout": 0.1}}, "has no options"),
        ("mnist_cnn", {"classes": 0}, "classes = 0"),
        ("mnist_cnn", {"channels": -1}, "channels = -1"),
        ("mnist_cnn", {"image_size": 21}, "at least 22"),
    ],
)
def test_bad_requests_get_one_sentence(
    name: str, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        models.build(name, **{"classes": 10, "channels": 1, **arguments})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SMALL_FIRST)
def test_fx_can_trace(name: str) -> None:
    size = SMALL_SIZE.get(name, 32)
    module = on_meta(name, image_size=size)
    traced = torch.fx.symbolic_trace(module)
    sample = torch.zeros(2, models.spec(name).channels, size, size, device="meta")
    assert traced(sample).shape == module(sample).shape


@pytest.mark.parametrize("name", SMALL_FIRST)
def test_torch_export_can_trace(name: str) -> None:
    known = models.spec(name)
    size = SMALL_SIZE.get(name, 32)
    module = on_meta(name, image_size=size)
    sample = torch.zeros(2, known.channels, size, size, device="meta")
    exported = torch.export.export(module, (sample,))
    assert exported.module()(sample).shape == (2, known.classes)


@pytest.mark.parametrize("name", ["mnist_cnn", "alexnet"])
def test_every_layer_of_the_chain_may_start_a_pipeline_stage(name: str) -> None:
    """A stage receives a leaf tensor, which an in-place layer could not overwrite."""
    size = SMALL_SIZE[name]
    module = models.build(name, classes=2, channels=1, image_size=size)
    with torch.no_grad():
        activation = torch.randn(1, 1, size, size)
        received = []
        for layer in module.get_submodule("features").children():
            received.append((layer, activation))
            activation = layer(activation)
    for layer, tensor in received:
        leaf = tensor.clone().requires_grad_()
        layer(leaf).sum().backward()
        assert leaf.grad is not None


def test_every_block_of_a_resnet_may_start_a_pipeline_stage() -> None:
    module = models.build("resnet18", classes=2, channels=1, options={"stem": "small"})
    for name, width in (("layer1.0", 64), ("layer1.1", 64), ("layer2.0", 64), ("layer4.1", 512)):
        leaf = torch.randn(2, width, 4, 4, requires_grad=True)
        before = leaf.detach().clone()
        module.get_submodule(name)(leaf).sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf, before)


@pytest.mark.parametrize(
    ("name", "gigaflops"),
    [
        ("alexnet", 0.71),
        ("vgg16", 15.47),
        ("vgg19", 19.63),
        ("resnet18", 1.81),
        ("resnet34", 3.66),
        ("resnet50", 4.09),
        ("resnet152", 11.51),
    ],
)
def test_summary_equals_the_published_figures(name: str, gigaflops: float) -> None:
    summary = models.summarise(on_meta(name), (3, 224, 224))
    assert round(summary.gigaflops, 2) == gigaflops
    assert summary.parameters == PUBLISHED[name]
    assert summary.megabytes == pytest.approx(PUBLISHED[name] * 4 / 1e6)
    assert sum(layer.parameters for layer in summary.layers) == summary.parameters
    assert sum(layer.flops for layer in summary.layers) == summary.flops


def test_summary_leaves_the_module_and_the_random_state_alone() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(inputs + torch.rand_like(inputs)))

    module = Noisy().train()
    module.head.eval()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    random_state = torch.get_rng_state()
    summary = models.summarise(module, (4,))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [each.training for each in module.modules()] == [True, True, False]
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
    assert [(layer.name, layer.output_shape, layer.flops) for layer in summary.layers] == [
        ("norm", (4,), 0),
        ("head", (2,), 8),
    ]


def test_summary_counts_operations_and_parameters_outside_layers() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, 4))
            self.first = nn.Linear(4, 4)
            self.again = self.first

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.again(self.first(inputs)), self.scale)

    summary = models.summarise(Mixed(), (4,))
    rows = {layer.name: (layer.kind, layer.parameters, layer.flops) for layer in summary.layers}
    assert rows == {"": ("Mixed", 12, 12), "first": ("Linear", 20, 32)}
    assert (summary.parameters, summary.flops) == (32, 44)


def test_summary_of_a_sample_that_does_not_fit() -> None:
    module = models.build("mnist_cnn", classes=10, channels=1)
    with pytest.raises(ModelError, match="cannot take a sample of 3x28x28"):
        models.summarise(module, (3, 28, 28))
    assert not any(each._forward_hooks for each in module.modules())


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys; from paceline import models, references; models.names();"
        " models.spec('vgg16'); import paceline.commands.models; print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert result.stdout.strip() == "False"
