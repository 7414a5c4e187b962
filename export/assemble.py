"""Join traced stages to a whole graph.

A graph is a row of calls of stages, each with the weights of its layer; the calls are then inlined, so export time hardly grows with depth.
Knows onnx-ir and signatures. Does not know the models (export.graphs) nor where weights lie (export.weights).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, InlinePass, RemoveUnusedNodesPass

from dspark.export.trace import IR_VERSION, STAGES, Stage
from dspark.plugins.contract import DOMAIN, VERSION
from dspark.runtime.graphs import MODEL_DTYPE, Signature, TensorSpec

_IR_DTYPES = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
    "float32": ir.DataType.FLOAT,
    "int64": ir.DataType.INT64,
}


class Assembly:
    """A graph in the making: call stages on values, then `finish`.

    `weight` returns the tensor of a parameter name; each is registered once, whatever the number of its uses.
    """

    def __init__(self, name: str, signature: Signature, dtype: str, opset: int, weight: Callable[[str], ir.TensorProtocol]) -> None:
        self._signature, self._dtype, self._weight = signature, dtype, weight
        self._inputs = {spec.name: self._value(spec) for spec in signature.inputs}
        self._weights: dict[str, ir.Value] = {}
        self._functions: dict[ir.OperatorIdentifier, ir.Function] = {}
        imports = {"": opset, DOMAIN: VERSION, STAGES: 1}
        self._graph = ir.Graph(list(self._inputs.values()), [], nodes=[], opset_imports=imports, name=name)

    def __getitem__(self, name: str) -> ir.Value:
        return self._inputs[name]

    def call(self, stage: Stage, *inputs: ir.Value, layer: int | None = None) -> list[ir.Value]:
        """Call `stage`; in the names of its weights `layers.0.` stands for `layers.<layer>.`."""
        names = [n if layer is None else n.replace("layers.0.", f"layers.{layer}.", 1) for n in stage.weights]
        weights = [self._weight_value(name) for name in names]
        self._functions[stage.function.identifier()] = stage.function
        outputs = len(stage.function.outputs)
        node = ir.node(stage.function.name, [*inputs, *weights], domain=STAGES, num_outputs=outputs)
        self._graph.append(node)
        return list(node.outputs)

    def finish(self, outputs: Sequence[ir.Value], functions: Sequence[ir.Function]) -> ir.Model:
        """Return the model with `outputs` named by the signature and the operators' `functions` attached."""
        self._graph.outputs.extend(outputs)
        model = ir.Model(self._graph, ir_version=IR_VERSION, producer_name="dspark", functions=list(self._functions.values()))
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
        del model.opset_imports[STAGES]
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
