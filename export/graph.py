"""Trace stages of a model with no weights in memory, and join them to a whole graph.

Layers of a model are alike, so one layer is traced and called once per layer: each stage becomes a local function, the graph is a row
of calls with each layer's weights, and the calls are inlined. Export time hardly grows with depth.
Knows torch.export and onnx-ir. Does not know the models (export.graphs joins them) nor where weights lie (export.weights).
Shape letters as in runtime.graphs.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import onnx_ir as ir
import onnxscript.optimizer
import torch
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    CommonSubexpressionEliminationPass,
    InlinePass,
    RemoveUnusedNodesPass,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim

from dspark.plugins.contract import DOMAIN, VERSION
from dspark.runtime.graphs import MODEL_DTYPE, Signature, TensorSpec

_TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "int64": torch.int64,
    "bool": torch.bool,
}
_IR_DTYPES = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
    "float32": ir.DataType.FLOAT,
    "int64": ir.DataType.INT64,
    "bool": ir.DataType.BOOL,
}

_STAGES = "stage"
_IR_VERSION = 11
_FOLDED_SIZE_LIMIT = 1024

ModelT = TypeVar("ModelT", bound=nn.Module)

# Any sizes above 1 do: they only have to be distinct from each other and from no model dimension.
_EXAMPLE_SIZES = {"B": 2, "N": 3, "M": 2, "R": 48, "S": 80, "Q": 7}


@dataclass(frozen=True)
class Stage:
    """A traced part of a model: a function whose inputs are its own, then `weights` by parameter name."""

    function: ir.Function
    weights: tuple[str, ...]


@dataclass(frozen=True)
class _Plan:
    name: str
    model: nn.Module
    method: Callable[..., object]
    inputs: Sequence[TensorSpec]
    outputs: Sequence[str]


class _Union(nn.Module):
    """Runs the planned stages side by side, each on inputs of its own."""

    def __init__(self, plans: Sequence[_Plan]) -> None:
        super().__init__()
        self.plans = plans
        self.models = nn.ModuleList(dict.fromkeys(plan.model for plan in plans))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs: list[Tensor] = []
        for plan in self.plans:
            own, inputs = inputs[: len(plan.inputs)], inputs[len(plan.inputs) :]
            result = plan.method(*own)
            outputs += [result] if isinstance(result, Tensor) else result
        return tuple(outputs)


class Tracer:
    """Traces stages of models that are made under fake tensors: shapes and dtypes, no storage.

    All stages are traced in one export: its fixed cost (1.2 s on two cores) is more than that of most stages.
    """

    def __init__(self, dtype: str, opset: int) -> None:
        self.dtype, self.opset = dtype, opset
        self._fake = FakeTensorMode()
        self._plans: list[_Plan] = []

    def build(self, make: Callable[[], ModelT]) -> ModelT:
        """Make a model whose parameters have the graph's dtype and no storage."""
        previous = torch.get_default_dtype()
        torch.set_default_dtype(_TORCH_DTYPES[self.dtype])
        try:
            with self._fake:
                return make().eval()
        finally:
            torch.set_default_dtype(previous)

    def plan(
        self, name: str, model: nn.Module, method: Callable[..., object], inputs: Sequence[TensorSpec], outputs: Sequence[str]
    ) -> None:
        """Plan a stage: `method` of `model` over `inputs`, letters in their shapes staying symbolic."""
        self._plans.append(_Plan(name, model, method, inputs, outputs))

    def trace(self) -> dict[str, Stage]:
        """Trace the planned stages and return them by name."""
        dynamic = []
        for i, plan in enumerate(self._plans):
            # Letters get a suffix, so that no stage takes a size from another's input.
            letters = {letter for spec in plan.inputs for letter in spec.shape if isinstance(letter, str)}
            dims = {letter: Dim(f"{letter}_{i}", min=1) for letter in letters}
            dynamic += [{axis: dims[d] for axis, d in enumerate(spec.shape) if isinstance(d, str)} for spec in plan.inputs]
        with self._fake, _quiet(), torch.no_grad():
            program = torch.onnx.export(
                _Union(self._plans),
                tuple(self._example(spec) for plan in self._plans for spec in plan.inputs),
                dynamo=True,
                opset_version=self.opset,
                dynamic_shapes=(tuple(dynamic),),
                input_names=[f"{spec.name}_{i}" for i, plan in enumerate(self._plans) for spec in plan.inputs],
                output_names=[f"{name}_{i}" for i, plan in enumerate(self._plans) for name in plan.outputs],
                optimize=False,
                verbose=False,
            )
        assert program is not None
        union = program.model.graph
        # By position: where a stage hands an input on, both have one name.
        inputs, outputs = list(union.inputs), list(union.outputs)
        stages = {}
        for plan in self._plans:
            own_inputs, inputs = inputs[: len(plan.inputs)], inputs[len(plan.inputs) :]
            own_outputs, outputs = outputs[: len(plan.outputs)], outputs[len(plan.outputs) :]
            stages[plan.name] = self._stage(plan, union, own_inputs, own_outputs)
        return stages

    def _stage(self, plan: _Plan, union: ir.Graph, inputs: list[ir.Value], outputs: list[ir.Value]) -> Stage:
        """Copy the nodes that compute `outputs` into a function of their own.

        Weights, which have no storage, become inputs: so the optimizer neither reads nor folds them. The small rest of the
        initializers become Constant nodes, since a function holds none.
        """
        nodes = _nodes_behind(union, outputs)
        initializers = dict.fromkeys(v for node in nodes for v in node.inputs if v is not None and v.is_initializer())
        weights = [v for v in initializers if isinstance(getattr(v.const_value, "raw", None), FakeTensor)]
        small = [v for v in initializers if v not in weights]
        imports = {"": self.opset, DOMAIN: VERSION}
        view = ir.GraphView([*inputs, *weights], outputs, nodes=nodes, initializers=small, opset_imports=imports, name=plan.name)
        graph = view.clone()
        for value in graph.inputs:
            value.const_value = None
        for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
            _drop_suffixes(value)
        traced = ir.Model(graph, ir_version=_IR_VERSION)
        # Small outputs only: a folded range over the vocabulary would be stored once per use.
        onnxscript.optimizer.optimize_ir(traced, output_size_limit=_FOLDED_SIZE_LIMIT)
        _read_sizes_from_last_input(graph, len(inputs))
        _initializers_to_constants(graph)
        ClearMetadataAndDocStringPass()(traced)
        function = ir.Function(domain=_STAGES, name=plan.name, graph=graph, attributes=[])
        prefix = f"models.{list(dict.fromkeys(p.model for p in self._plans)).index(plan.model)}."
        return Stage(function, tuple(str(value.name).removeprefix(prefix) for value in weights))

    def _example(self, spec: TensorSpec) -> Tensor:
        sizes = [_EXAMPLE_SIZES[d] if isinstance(d, str) else d for d in spec.shape]
        dtype = self.dtype if spec.dtype == MODEL_DTYPE else spec.dtype
        return torch.zeros(sizes, dtype=_TORCH_DTYPES[dtype])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's notes on its own internals; errors are exceptions."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def _nodes_behind(graph: ir.Graph, outputs: Sequence[ir.Value]) -> list[ir.Node]:
    """Return the nodes that `outputs` depend on, in the graph's order."""
    needed: set[ir.Node] = set()
    pending = list(outputs)
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in needed:
            needed.add(node)
            pending += [value for value in node.inputs if value is not None]
    return [node for node in graph if node in needed]


def _initializers_to_constants(graph: ir.Graph) -> None:
    for value in list(graph.initializers.values()):
        constant = ir.node("Constant", [], attributes={"value": ir.AttrTensor("value", value.const_value)})
        constant.outputs[0].name = value.name
        graph.insert_before(graph[0], constant)
        ir.convenience.replace_all_uses_with(value, constant.outputs[0])
        del graph.initializers[value.name]


def _read_sizes_from_last_input(graph: ir.Graph, inputs: int) -> None:
    """Let each run-time size be read from the last of the stage's own inputs that has it, whatever tensor the exporter read it from."""
    sources = {
        dim.value: (value, axis)
        for value in graph.inputs[:inputs]
        for axis, dim in enumerate(value.shape or ())
        if isinstance(dim, ir.SymbolicDim)
    }
    for node in graph:
        if node.op_type != "Shape" or node.inputs[0] is None or node.inputs[0].shape is None:
            continue
        start, end = (node.attributes[name].as_int() if name in node.attributes else None for name in ("start", "end"))
        if start is None or end != start + 1:
            continue
        dim = node.inputs[0].shape[start]
        if isinstance(dim, ir.SymbolicDim) and dim.value in sources:
            value, axis = sources[dim.value]
            node.replace_input_with(0, value)
            node.attributes["start"], node.attributes["end"] = ir.AttrInt64("start", axis), ir.AttrInt64("end", axis + 1)


def _drop_suffixes(value: ir.Value) -> None:
    if value.shape is not None:
        dims = [re.sub(r"\b([A-Z])_\d+", r"\1", str(d.value)) if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
        value.shape = ir.Shape(dims)


class Assembly:
    """A graph in the making: call stages on values, then `finish`.

    `weight` returns the tensor of a parameter name; each is registered once, whatever the number of its uses.
    """

    def __init__(self, name: str, signature: Signature, dtype: str, opset: int, weight: Callable[[str], ir.TensorProtocol]) -> None:
        self._signature, self._dtype, self._weight = signature, dtype, weight
        self._inputs = {spec.name: self._value(spec) for spec in signature.inputs}
        self._weights: dict[str, ir.Value] = {}
        self._functions: dict[ir.OperatorIdentifier, ir.Function] = {}
        imports = {"": opset, DOMAIN: VERSION, _STAGES: 1}
        self._graph = ir.Graph(list(self._inputs.values()), [], nodes=[], opset_imports=imports, name=name)

    def __getitem__(self, name: str) -> ir.Value:
        return self._inputs[name]

    def call(self, stage: Stage, *inputs: ir.Value, layer: int | None = None) -> list[ir.Value]:
        """Call `stage`; in the names of its weights `layers.0.` stands for `layers.<layer>.`."""
        names = [n if layer is None else n.replace("layers.0.", f"layers.{layer}.", 1) for n in stage.weights]
        weights = [self._weight_value(name) for name in names]
        self._functions[stage.function.identifier()] = stage.function
        outputs = len(stage.function.outputs)
        node = ir.node(stage.function.name, [*inputs, *weights], domain=_STAGES, num_outputs=outputs)
        self._graph.append(node)
        return list(node.outputs)

    def finish(self, outputs: Sequence[ir.Value], functions: Sequence[ir.Function]) -> ir.Model:
        """Return the model with `outputs` named by the signature and the operators' `functions` attached."""
        self._graph.outputs.extend(outputs)
        model = ir.Model(self._graph, ir_version=_IR_VERSION, producer_name="dspark", functions=list(self._functions.values()))
        InlinePass()(model)
        CommonSubexpressionEliminationPass()(model)
        RemoveUnusedNodesPass()(model)
        assert len(self._graph.outputs) == len(self._signature.outputs)
        for value, spec in zip(self._graph.outputs, self._signature.outputs, strict=True):
            declared = self._value(spec)
            value.name, value.shape, value.type = spec.name, declared.shape, declared.type
        used = {node.op_type for node in self._graph if node.domain == DOMAIN}
        for function in functions:
            if function.name in used:
                model.functions[function.identifier()] = function
        for name, node in enumerate(self._graph):
            node.name = f"{node.op_type}.{name}"
        del model.opset_imports[_STAGES]
        if not used:
            del model.opset_imports[DOMAIN]
        return model

    def _weight_value(self, name: str) -> ir.Value:
        if name not in self._weights:
            tensor = self._weight(name)
            # Two parameters may name one tensor (a tied head): it is mapped once, under the tensor's own name.
            known = self._graph.initializers.get(tensor.name or name)
            if known is None:
                known = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
                self._graph.register_initializer(known)
            self._weights[name] = known
        return self._weights[name]

    def _value(self, spec: TensorSpec) -> ir.Value:
        dtype = self._dtype if spec.dtype == MODEL_DTYPE else spec.dtype
        return ir.Value(name=spec.name, shape=ir.Shape(spec.shape), type=ir.TensorType(_IR_DTYPES[dtype]))
