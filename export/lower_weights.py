"""Lower a graph to quantised weights: the graph as traced, its stand-in weights replaced by the forms that the bundle keeps.

* A product with a quantised weight becomes MatMulNBits, ONNX Runtime's operator, whose CPU kernels quantise the inputs to 8 bits too.
* Rows are gathered from a table in the dtype it is stored in, and cast.
* Every other weight is the float32 one.

Knows onnx-ir models. Does not know where weights lie or how they are quantised (export.weights, export.quantize).
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from dspark.export.weights import Forms

NBITS_DOMAIN = "com.microsoft"
NBITS = "MatMulNBits"
ACCURACY_LEVEL = 4
"""Products in integers, inputs quantised group by group. In float32, level 1, the 8-bit kernel took 2650 ms where this takes 133 for a
step of a 0.6B shape (a Zen 4 machine)."""


def lower_weights(model: ir.Model, forms: Callable[[str], Forms], group_size: int) -> None:
    """Replace the stand-ins of the weights in `model`, in place; `forms` gives those of a weight by its name."""
    graph = model.graph
    stand_ins = [value for value in graph.initializers.values() if isinstance(value.const_value, ir.LazyTensor)]
    for value in stand_ins:
        assert value.name is not None
        kept = forms(value.name)
        for use in list(value.uses()):
            if use.node.op_type == "Gemm" and use.idx == 1 and kept.product is not None:
                _multiply(graph, use.node, kept, group_size)
            elif use.node.op_type == "Gather" and use.idx == 0 and kept.table is not None and kept.table.dtype != value.dtype:
                _gather(graph, use.node, kept.table)
        if value.uses():
            assert kept.plain is not None, f"{value.name} is kept in no form that its readers take"
            value.const_value = kept.plain
        else:
            del graph.initializers[value.name]
    if any(node.domain == NBITS_DOMAIN for node in graph):
        model.opset_imports[NBITS_DOMAIN] = 1


def _multiply(graph: ir.Graph, node: ir.Node, kept: Forms, group_size: int) -> None:
    """Replace a Gemm, `x [rows, I]` on a weight `[N, I]`, plus a bias or not."""
    assert kept.product is not None
    assert node.attributes["transB"].as_int() == 1
    weight = node.inputs[1]
    assert weight is not None
    rows, columns = weight.shape
    attributes = {"K": columns, "N": rows, "bits": kept.bits, "block_size": group_size, "accuracy_level": ACCURACY_LEVEL}
    inputs = [node.inputs[0], *(_initializer(graph, tensor) for tensor in kept.product)]
    if len(node.inputs) > 2:
        inputs += [None, None, node.inputs[2]]
    product = ir.node(NBITS, inputs, attributes, domain=NBITS_DOMAIN, name=f"{node.name}.{NBITS}")
    ir.convenience.replace_nodes_and_values(graph, node, [node], [product], node.outputs, product.outputs)


def _gather(graph: ir.Graph, node: ir.Node, table: ir.TensorProtocol) -> None:
    """Let a Gather read a table of another dtype, and cast its rows."""
    gathered = ir.node("Gather", [_initializer(graph, table), node.inputs[1]], {"axis": 0}, name=f"{node.name}.rows")
    gathered.outputs[0].dtype, gathered.outputs[0].shape = table.dtype, node.outputs[0].shape
    cast = ir.node("Cast", gathered.outputs, {"to": node.outputs[0].dtype or ir.DataType.FLOAT}, name=f"{node.name}.cast")
    ir.convenience.replace_nodes_and_values(graph, node, [node], [gathered, cast], node.outputs, cast.outputs)


def _initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    assert tensor.name is not None
    known = graph.initializers.get(tensor.name)
    if known is None:
        known = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(known)
    return known
