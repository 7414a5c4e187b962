"""Lower a graph to quantised weights: the graph as traced, its stand-in weights replaced by the forms that the bundle keeps.

* A product with a quantised weight becomes MatMulNBits, ONNX Runtime's operator, whose CPU kernels quantise the inputs to 8 bits too.
* A 4-bit product of a single row gets a second one, of zeros: its kernel for one row sums in another order than that for several,
  and where inputs are rounded to 8 bits such a difference of 1e-7 grows from layer to layer, on the example pair to 0.09 in the
  logits. 18 of 120 prompts then had another greedy output speculatively than plainly. With two rows and more, and with 8 bits, results
  are the same bits whatever the number of rows (a Zen 3 machine; a test compares them).
* Rows are gathered from a table in the dtype it is stored in, and cast.
* Every other weight is the float32 one.

Knows onnx-ir models. Does not know where weights lie or how they are quantised (export.weights, export.quantize).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import onnx_ir as ir

from dspark.export.weights import Forms

NBITS_DOMAIN = "com.microsoft"
NBITS = "MatMulNBits"
ACCURACY_LEVEL = 4
"""Products in integers, inputs quantised group by group. In float32, level 1, the 8-bit kernel took 2650 ms where this takes 133 for a
step of a 0.6B shape (a Zen 4 machine)."""

PADDED_BITS = (4,)


def lower_weights(model: ir.Model, forms: Callable[[str], Forms], group_size: int) -> None:
    """Replace the stand-ins of the weights in `model`, in place; `forms` gives those of a weight by its name."""
    graph = model.graph
    stand_ins = [value for value in graph.initializers.values() if isinstance(value.const_value, ir.LazyTensor)]
    kept = {value: forms(str(value.name)) for value in stand_ins}
    padding = _Padding(graph)
    for node in list(graph):
        weight = next((value for value in node.inputs if value in kept), None)
        if weight is None:
            continue
        form = kept[weight]
        if node.op_type == "Gemm" and weight is node.inputs[1] and form.product is not None:
            _multiply(graph, node, form, group_size, padding)
        elif node.op_type == "Gather" and form.table is not None and form.table.dtype != weight.dtype:
            _gather(graph, node, form.table)
    for value in stand_ins:
        form, name = kept[value], str(value.name)
        if value.uses():
            assert form.plain is not None, f"{name} is kept in no form that its readers take"
            value.const_value = form.plain
        else:
            del graph.initializers[name]
    if any(node.domain == NBITS_DOMAIN for node in graph):
        model.opset_imports[NBITS_DOMAIN] = 1


class _Padding:
    """Makes a single row two rows, and two again one; what depends on the number of rows alone is computed once in the graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._sizes: dict[str, tuple[ir.Value, ir.Value]] = {}
        self._padded: dict[ir.Value, ir.Value] = {}

    def is_needed(self, x: ir.Value) -> bool:
        """Whether `x [rows, I]` may have a single row."""
        assert x.shape is not None
        rows = x.shape[0]
        return not (isinstance(rows, int) and rows > 1) and re.match(r"([2-9]|\d\d+)\*", str(rows)) is None

    def pad(self, x: ir.Value, before: ir.Node) -> ir.Value:
        """Return `x [rows, I]` with a row of zeros behind a single row."""
        if x not in self._padded:
            _, pads = self._size(x, before)
            self._padded[x] = self._add(before, "Pad", [x, pads])
        return self._padded[x]

    def cut(self, y: ir.Node, x: ir.Value, before: ir.Node) -> ir.Node:
        """Return the node that cuts the output of `y` to the rows of `x`."""
        rows, _ = self._size(x, before)
        zero = self._constant([0])
        return ir.node("Slice", [y.outputs[0], zero, rows, zero], name=f"{y.name}.cut")

    def _size(self, x: ir.Value, before: ir.Node) -> tuple[ir.Value, ir.Value]:
        """Return the rows of `x` as a vector of one, and the sizes that Pad takes."""
        assert x.shape is not None
        letters = "*".join(sorted(str(x.shape[0]).split("*")))
        if letters not in self._sizes:
            rows = self._add(before, "Shape", [x], start=0, end=1)
            absent = self._add(before, "Max", [self._add(before, "Sub", [self._constant([2]), rows]), self._constant([0])])
            pads = self._add(before, "Concat", [self._constant([0, 0]), absent, self._constant([0])], axis=0)
            self._sizes[letters] = rows, pads
        return self._sizes[letters]

    def _constant(self, values: list[int]) -> ir.Value:
        name = f"rows.{'.'.join(map(str, values))}"
        return self._graph.initializers.get(name) or _initializer(self._graph, ir.tensor(values, dtype=ir.DataType.INT64, name=name))

    def _add(self, before: ir.Node, op_type: str, inputs: list[ir.Value], **attributes: int) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, name=f"{before.name}.{op_type.lower()}")
        node.outputs[0].name = f"{node.name}.out"
        self._graph.insert_before(before, node)
        return node.outputs[0]


def _multiply(graph: ir.Graph, node: ir.Node, kept: Forms, group_size: int, padding: _Padding) -> None:
    """Replace a Gemm, `x [rows, I]` on a weight `[N, I]`, plus a bias or not."""
    x, weight, *bias = node.inputs
    assert kept.product is not None
    assert x is not None
    assert weight is not None
    assert node.attributes["transB"].as_int() == 1
    rows, columns = weight.shape
    attributes = {"K": columns, "N": rows, "bits": kept.bits, "block_size": group_size, "accuracy_level": ACCURACY_LEVEL}
    pads = kept.bits in PADDED_BITS and padding.is_needed(x)
    inputs = [padding.pad(x, node) if pads else x, *(_initializer(graph, tensor) for tensor in kept.product)]
    if bias:
        inputs += [None, None, *bias]
    product = ir.node(NBITS, inputs, attributes, domain=NBITS_DOMAIN, name=f"{node.name}.{NBITS}")
    made = [product, padding.cut(product, x, node)] if pads else [product]
    ir.convenience.replace_nodes_and_values(graph, node, [node], made, node.outputs, made[-1].outputs)


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
