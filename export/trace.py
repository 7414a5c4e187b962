"""Trace stages of torch models, with no weights in memory, into ONNX functions.

Layers of a model are alike, so one layer is traced; `export.assemble` calls it once per layer.
Knows torch.export and onnx-ir. Does not know the models (export.graphs names their stages). Shape letters as in runtime.graphs.
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
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim

from dspark.plugins.contract import DOMAIN, VERSION
from dspark.runtime.graphs import MODEL_DTYPE, TensorSpec

_TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "int64": torch.int64,
    "bool": torch.bool,
}

STAGES = "stage"
IR_VERSION = 11
_FOLDED_SIZE_LIMIT = 1024

ModelT = TypeVar("ModelT", bound=nn.Module)

# Any sizes above 1: the exporter would take 1 for a fixed size.
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
        traced = ir.Model(graph, ir_version=IR_VERSION)
        # Small outputs only: a folded range over the vocabulary would be stored once per use.
        onnxscript.optimizer.optimize_ir(traced, output_size_limit=_FOLDED_SIZE_LIMIT)
        _read_sizes_from_last_input(graph, len(inputs))
        _initializers_to_constants(graph)
        ClearMetadataAndDocStringPass()(traced)
        function = ir.Function(domain=STAGES, name=plan.name, graph=graph, attributes=[])
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
