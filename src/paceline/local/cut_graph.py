"""A model as a list of operations in the order of execution, and its stages.

The stages are graphs over the model's own modules and parameters: nothing is
copied, so what a stage trains is what the whole model holds.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from paceline.errors import StrategyError, unknown_name
from paceline.local.faithful import (
    UntraceableError,
    backward_nodes,
    compare,
    training_pass,
    untouched,
)

_FEW = 4
"""Samples on which a trace for any batch size is held against the model."""


@dataclass(frozen=True)
class Value:
    """What one operation gave when the graph was run on a sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    """Its gradient is part of the model's: not before a `no_grad` block, or for integers."""

    @property
    def nbytes(self) -> int:
        """Bytes that the value takes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross a cut: the value forward, and its gradient back if it has one."""
        return self.nbytes * (2 if self.requires_grad else 1)


class ModelGraph:
    """One traced model. Position i is the cut before operation i."""

    def __init__(
        self, module: fx.GraphModule, values: dict[str, Value | None], *, any_size: bool
    ) -> None:
        self.module = module
        self.values = values
        self.any_size = any_size
        """The operations are the same for any batch size."""
        nodes = list(module.graph.nodes)
        self.source = next(node for node in nodes if node.op == "placeholder")
        self.result = _single_output(next(node for node in nodes if node.op == "output"))
        self.order = [node for node in nodes if node.op.startswith("call_")]
        self._index = {node: number for number, node in enumerate(self.order)}
        self._names = self._begin_names()
        self._last = {node: self._last_use(node) for node in [self.source, *self.order]}

    # --- names ----------------------------------------------------------------

    def _paths(self, number: int) -> list[str]:
        stack = self.order[number].meta.get("nn_module_stack") or {}
        return [entry[0] for entry in stack.values() if entry[0]]

    def _begin_names(self) -> dict[str, int]:
        names: dict[str, int] = {}
        for number in range(len(self.order)):
            for path in self._paths(number):
                names.setdefault(path, number)
        for number, node in enumerate(self.order):
            names.setdefault(node.name, number)
        return names

    def name_at(self, position: int) -> str:
        """The outermost layer that begins at a position, or the operation's own name."""
        for path in self._paths(position):
            if self._names[path] == position:
                return path
        return str(self.order[position].name)

    def resolve(self, names: tuple[str, ...]) -> list[int]:
        """The positions of the layers that stages are to begin with."""
        allowed = self.positions(single=False)
        positions = []
        for name in names:
            position = self._names.get(name)
            if position is None:
                valid = [self.name_at(p) for p in allowed]
                raise StrategyError(unknown_name("layer in local.split_at", name, valid))
            if position == 0:
                raise StrategyError(
                    f"local.split_at = {name!r} is where the model begins, so the first stage would"
                    " be empty: name a later layer"
                )
            if position not in allowed:
                near = self.name_at(min(allowed, key=lambda p: abs(p - position)))
                raise StrategyError(
                    f"the model cannot be cut before {name!r}, where a parameter or something other"
                    f" than a tensor is needed on both sides: the nearest cut is before {near!r}"
                )
            positions.append(position)
        if positions != sorted(set(positions)):
            raise StrategyError(
                f"local.split_at = {list(names)} must name layers in the order in which they run"
            )
        return positions

    # --- cuts -----------------------------------------------------------------

    def crossing(self, position: int) -> list[fx.Node]:
        """The values computed before a position that are needed at or after it."""
        if position == 0:
            return [self.source]
        if position == len(self.order):
            return [self.result]
        before = [self.source, *self.order[:position]]
        return [node for node in before if self._last[node] >= position]

    def _last_use(self, node: fx.Node) -> int:
        uses = [self._index[user] for user in node.users if user in self._index]
        if node is self.result:
            uses.append(len(self.order))
        return max(uses, default=-1)

    def positions(self, *, single: bool) -> list[int]:
        """Where the model can be cut: only tensors cross (one alone if `single`), and no
        parameter or buffer is used on both sides."""
        spans = self._state_spans()
        found = []
        for position in range(1, len(self.order)):
            if any(first < position <= last for first, last in spans):
                continue
            crossing = self.crossing(position)
            if any(self.values.get(node.name) is None for node in crossing):
                continue
            if not single or len(crossing) == 1:
                found.append(position)
        return found

    def _state_spans(self) -> list[tuple[int, int]]:
        """First and last operation that use each parameter or buffer used more than once."""
        uses: dict[int, list[int]] = {}
        for number, node in enumerate(self.order):
            for tensor in self.tensors_of(node):
                uses.setdefault(id(tensor), []).append(number)
        return [(min(u), max(u)) for u in uses.values() if min(u) != max(u)]

    def tensors_of(self, node: fx.Node) -> list[torch.Tensor]:
        """Parameters and buffers that one operation uses."""
        found: list[torch.Tensor] = []
        if node.op == "call_module":
            layer = self.module.get_submodule(str(node.target))
            found += [*layer.parameters(), *layer.buffers()]
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                value = operator.attrgetter(str(source.target))(self.module)
                if isinstance(value, torch.Tensor):
                    found.append(value)
        return found

    @property
    def signature(self) -> list[tuple[str, ...]]:
        """The operations with the numbers they are given, but for sizes: those are whole."""
        return [
            (node.op, str(node.target), *(str(n) for n in _fractions((node.args, node.kwargs))))
            for node in self.order
        ]

    # --- stages ---------------------------------------------------------------

    def stage(self, first: int, end: int) -> fx.GraphModule:
        """The operations from `first` up to `end` as a module: crossing values in and out."""
        graph = fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        nodes = self.order[first:end]
        for number, node in enumerate(self.crossing(first)):
            known[node] = graph.placeholder(f"input_{number}")
        for node in self.crossing(first):
            if first > 0 and self._overwritten(node, set(nodes)):
                # Autograd lets nobody overwrite a leaf, which a received tensor is.
                known[node] = graph.call_function(torch.clone, (known[node],))

        def look_up(node: fx.Node) -> fx.Node:
            if node.op == "get_attr" and node not in known:
                known[node] = graph.node_copy(node)
            return known[node]

        for node in nodes:
            for source in node.all_input_nodes:
                look_up(source)
            known[node] = graph.node_copy(node, look_up)
        graph.output(tuple(known[node] for node in self.crossing(end)))
        return fx.GraphModule(self.module, graph)

    def _overwritten(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """True when an operation may write into `node`'s memory, directly or through a view."""
        waiting, seen = [user for user in node.users if user in inside], set()
        while waiting:
            user = waiting.pop()
            if self._works_in_place(user):
                return True
            if user not in seen and not self.tensors_of(user):
                seen.add(user)
                waiting += [later for later in user.users if later in inside]
        return False

    def _works_in_place(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            layer = self.module.get_submodule(str(node.target))
            return bool(getattr(layer, "inplace", False))
        if node.kwargs.get("inplace") or node.kwargs.get("out") is not None:
            return True
        if isinstance(node.target, torch._ops.OpOverload):
            return bool(node.target._schema.is_mutable)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        return (name.endswith("_") and not name.endswith("__")) or (
            name in ("setitem", "iadd", "isub", "imul", "itruediv", "relu_")
        )


def _fractions(arguments: Any) -> list[float]:
    found: list[float] = []
    fx.node.map_aggregate(arguments, lambda a: found.append(a) if isinstance(a, float) else None)
    return found


def _single_output(node: fx.Node) -> fx.Node:
    result = node.args[0]
    if isinstance(result, tuple | list) and len(result) == 1:
        result = result[0]
    if not isinstance(result, fx.Node):
        raise UntraceableError("it gives back more than one tensor")
    return result


# --- tracing ------------------------------------------------------------------


class _Children(fx.Tracer):
    """Every layer of nested `nn.Sequential`s is one operation, whatever it does inside."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, nn.Sequential)


def _symbolic(model: nn.Module, tracer: fx.Tracer) -> fx.GraphModule:
    parameters = list(inspect.signature(model.forward).parameters.values())
    fixed = {p.name: p.default for p in parameters[1:] if p.default is not p.empty}
    graph = tracer.trace(model, concrete_args=fixed or None)
    module = fx.GraphModule(model, graph)
    for node in [n for n in graph.nodes if n.op == "placeholder"][1:]:
        _erase_checks(module.graph, node)
    return module


def _erase_checks(graph: fx.Graph, node: fx.Node) -> None:
    """Drop an argument that has its default, with the checks that FX adds for it."""
    for user in list(node.users):
        if user.op == "output":
            raise UntraceableError("it gives back one of its optional arguments")
        _erase_checks(graph, user)
    graph.erase_node(node)


def _exported(model: nn.Module, sample: torch.Tensor) -> fx.GraphModule:
    module = torch.export.export(model, (sample,), strict=False).module()
    assert isinstance(module, fx.GraphModule)
    for node in list(module.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            module.graph.erase_node(node)
    return module


def trace(
    model: nn.Module,
    sample: torch.Tensor,
    *,
    stages: int,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> ModelGraph:
    """The model as operations, by the first way that leaves room for `stages` stages.

    FX goes first: it keeps layers whole and works for any batch size. A Sequential
    can always be cut between its layers. `torch.export` follows what FX cannot
    (conditions on shapes, layers that are large inside), for one batch size.
    """
    model_pass = functools.cache(
        lambda size: training_pass(model, dict(model.named_parameters()), sample[:size], context)
    )
    ways: list[tuple[Callable[[], fx.GraphModule], bool]] = [
        (lambda: _symbolic(model, fx.Tracer()), True)
    ]
    if isinstance(model, nn.Sequential):
        ways.append((lambda: _symbolic(model, _Children()), True))
    ways.append((lambda: _exported(model, sample), False))
    reasons: list[str] = []
    for way, any_size in ways:
        try:
            module = way()
            graph = ModelGraph(module, probe(module, sample, context), any_size=any_size)
            size = min(_FEW, len(sample)) if any_size else len(sample)
            traced = training_pass(module, dict(model.named_parameters()), sample[:size], context)
            compare(model_pass(size), traced, dict(model.named_parameters()))
        except UntraceableError as error:
            reasons.insert(0, str(error))
            continue
        except Exception as error:  # tracing runs the model's own code: anything may come out
            reasons.append(str(error).strip().split("\n")[0])
            continue
        if len(graph.positions(single=False)) >= stages - 1:
            return graph
        places = len(graph.positions(single=False))
        reasons.append(f"it can be cut in {places} places, {stages - 1} are needed")
    raise StrategyError(
        f"{type(model).__name__} cannot be cut into {stages} stages ({reasons[0]}): use another"
        " local.strategy, or make the model an nn.Sequential"
    )


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.results: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.results[n.name] = result
        return result

    def values(self, output: Any) -> dict[str, Value | None]:
        """What every operation gave; a value needs a gradient only if the output has one for it."""
        output = output[0] if isinstance(output, tuple | list) else output
        flowing = backward_nodes(output) if isinstance(output, torch.Tensor) else set()
        return {
            name: Value(tuple(each.shape), each.dtype, each.grad_fn in flowing)
            if isinstance(each, torch.Tensor)
            else None
            for name, each in self.results.items()
        }


def probe(
    module: fx.GraphModule,
    sample: torch.Tensor,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> dict[str, Value | None]:
    """Shape and type of every value, from one run on a sample that leaves nothing changed."""
    recorder = _Recorder(module)
    with untouched(module), context():
        output = recorder.run(sample.clone())
    return recorder.values(output)
