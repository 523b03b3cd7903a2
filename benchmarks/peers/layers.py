"""A PyTorch network as a list of layers that another system can build: names, sizes, weights."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import fx, nn

Layer = dict[str, Any]


def describe(model: nn.Module, sample: torch.Tensor) -> tuple[list[Layer], dict[str, np.ndarray]]:
    """Layers in the order in which they are called, and their weights by "layer.weight".

    Each has `name`, `kind`, `inputs` (names of layers, "input" for the network's), and what its
    kind needs. A layer of another kind ends with a sentence.
    """
    from torch import fx
    from torch.fx.passes.shape_prop import ShapeProp

    traced = fx.symbolic_trace(model)
    ShapeProp(traced).propagate(sample)  # type: ignore[no-untyped-call]
    modules = dict(traced.named_modules())
    layers: list[Layer] = []
    weights: dict[str, np.ndarray] = {}
    names: dict[fx.Node, str] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            names[node] = "input"
            continue
        if node.op == "output":
            continue
        made = _layer(node, modules)
        if made["kind"] == "same":
            names[node] = names[node.args[0]]
            continue
        name = names[node] = f"layer_{len(layers)}"
        made |= {"name": name, "inputs": [names[each] for each in node.all_input_nodes]}
        layers.append(made)
        if node.op == "call_module":
            state = modules[str(node.target)].state_dict()
            weights |= {f"{name}.{key}": value.numpy() for key, value in state.items()}
    return layers, weights


def _layer(node: fx.Node, modules: dict[str, nn.Module]) -> Layer:
    if node.op == "call_module":
        first = node.all_input_nodes[0].meta["tensor_meta"].shape
        return _module(modules[str(node.target)], first)
    name = getattr(node.target, "__name__", str(node.target))
    if node.target in (operator.add, operator.iadd) or name in ("add", "iadd", "add_"):
        return {"kind": "add"}
    if name in ("relu", "relu_"):
        return {"kind": "relu"}
    if name == "flatten":
        return {"kind": "flatten"}
    raise SystemExit(f"a network that calls {name} cannot be built for this peer")


def _module(module: nn.Module, shape: Any) -> Layer:
    from torch import nn

    def pair(value: Any) -> list[int]:
        return list(value) if isinstance(value, tuple) else [int(value)] * 2

    match module:
        case nn.Conv2d():
            if module.groups != 1 or pair(module.dilation) != [1, 1]:
                raise SystemExit("groups and dilation of a convolution are not built here")
            return {
                "kind": "convolution",
                "filters": module.out_channels,
                "size": pair(module.kernel_size),
                "stride": pair(module.stride),
                "padding": pair(module.padding),
                "bias": module.bias is not None,
            }
        case nn.MaxPool2d():
            size, stride = pair(module.kernel_size), pair(module.stride)
            return {"kind": "pool", "size": size, "stride": stride, "padding": pair(module.padding)}
        case nn.AdaptiveAvgPool2d():
            wanted = pair(module.output_size)
            have = list(shape[2:])
            if have == wanted:
                return {"kind": "same"}
            if any(side % goal for side, goal in zip(have, wanted, strict=True)):
                raise SystemExit(f"{have} pixels cannot be averaged to {wanted} in equal parts")
            size = [side // goal for side, goal in zip(have, wanted, strict=True)]
            return {"kind": "average", "size": size}
        case nn.BatchNorm2d():
            return {"kind": "batch_norm", "momentum": module.momentum, "epsilon": module.eps}
        case nn.Linear():
            return {"kind": "dense", "units": module.out_features, "bias": module.bias is not None}
        case nn.Dropout():
            return {"kind": "dropout", "part": module.p} if module.p else {"kind": "same"}
        case nn.ReLU():
            return {"kind": "relu"}
        case nn.Flatten():
            return {"kind": "flatten"}
        case nn.Identity():
            return {"kind": "same"}
    raise SystemExit(f"{type(module).__name__} is not built for this peer")
