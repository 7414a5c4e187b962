"""Lower a bundle's ONNX graph for TensorRT: the same nodes, except where its parser or builder wants something else.

* The function bodies of our operators go: a plugin that is not found is then an error instead of silently inlined.
* `CachedAttention` becomes TensorRT's own attention op on key lengths. Its mask, and all that only the mask needed, goes too.
* Capacities of rings and caches are written into the state tensors' shapes: KVCacheUpdate wants a static one.

Knows ONNX protos. Never defines a model: what it returns has the names, inputs and outputs of the signature, checked.
B batch rows, N new rows, Hq query heads, G key/value heads, R ring capacity, S cache capacity, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

from dspark.plugins.contract import CACHED_ATTENTION, DOMAIN, OPERATORS, PLUGIN_ATTRIBUTES, PLUGINS
from dspark.runtime.errors import ExportError, numbered
from dspark.runtime.graphs import Signature

TRT_DOMAIN = "trt"
ATTENTION = "TRT_Attention"


def lower(model: onnx.ModelProto, signature: Signature, capacities: Mapping[str, int]) -> onnx.ModelProto:
    """Return the model that TensorRT's parser is given; `capacities` has the static size of the letters R and S.

    Raises ExportError where a node carries other plugin attributes than the contract's.
    """
    _check_plugin_nodes(model)
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    ours = {operator.name for operator in OPERATORS}
    kept = [function for function in lowered.functions if function.domain != DOMAIN or function.name not in ours]
    del lowered.functions[:]
    lowered.functions.extend(kept)
    graph = lowered.graph
    _lower_attention(graph, next((v.type.tensor_type.elem_type for v in graph.input if v.name in signature.aliases.values()), 0))
    _remove_unused(graph)
    _fix_capacities(graph, signature, capacities)
    domains = {node.domain for node in graph.node}
    if TRT_DOMAIN in domains:
        lowered.opset_import.append(helper.make_opsetid(TRT_DOMAIN, 1))
    _check(lowered, signature)
    return lowered


def _check_plugin_nodes(model: onnx.ModelProto) -> None:
    faults = []
    for node in model.graph.node:
        operator = next((o for o in PLUGINS if node.domain == DOMAIN and node.op_type == o.name), None)
        if operator is None:
            continue
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        for name, expected in PLUGIN_ATTRIBUTES.items():
            actual = given.get(name, b"").decode()
            if actual != expected:
                faults.append(f"{node.name} has {name} {actual!r}, expected {expected!r}")
        for name, kind in operator.attributes.items():
            if type(given.get(name)) is not kind:
                faults.append(f"{node.name} has {name} {given.get(name)!r}, expected {kind.__name__}")
    if faults:
        raise ExportError(f"graph {model.graph.name} is not what this dspark's plugins take, export it again:{numbered(faults)}")


def _lower_attention(graph: onnx.GraphProto, dtype: int) -> None:
    """Replace each CachedAttention, in a graph of `dtype`; the key lengths are one tensor for all layers.

    Row i of the last N of `start + N` keys sees the first start + i + 1 of them: causal, lower right. The op has no scale, so queries
    are scaled before it.
    """
    nodes: list[onnx.NodeProto] = []
    made: set[str] = set()

    def once(op_type: str, inputs: list[str], output: str, **attributes: int) -> str:
        if output not in made:
            made.add(output)
            nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    for node in graph.node:
        if node.domain != DOMAIN or node.op_type != CACHED_ATTENTION.name:
            nodes.append(node)
            continue
        query, keys, values, start, _ = node.input
        scale = helper.get_attribute_value(next(a for a in node.attribute if a.name == "scale"))
        factor = f"trt.scale.{scale:.9g}"
        if factor not in made:
            made.add(factor)
            graph.initializer.append(helper.make_tensor(factor, dtype, [], [scale]))
        rows = once("Shape", [query], f"{start}.trt.rows", start=2, end=3)
        lengths = once("Cast", [once("Add", [start, rows], f"{start}.trt.lengths64")], f"{start}.trt.lengths", to=TensorProto.INT32)
        scaled = once("Mul", [query, factor], f"{node.name}.trt.query")
        attributes: dict[str, str | int] = {"causal_kind": "lower_right", "query_form": "padded_bhnd", "kv_form": "padded_bhnd"}
        if dtype == TensorProto.FLOAT:
            # There are no fused float32 kernels; in other dtypes an attention that cannot be fused fails the build.
            attributes["TRT_decomposable"] = 1
        inputs = [scaled, keys, values, "", "", lengths]
        nodes.append(helper.make_node(ATTENTION, inputs, list(node.output), name=node.name, domain=TRT_DOMAIN, **attributes))
    del graph.node[:]
    graph.node.extend(nodes)


def _remove_unused(graph: onnx.GraphProto) -> None:
    """Drop nodes and initializers that no output needs: the mask, of which only CachedAttention had need."""
    needed, kept = {value.name for value in graph.output}, []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(name for name in node.input if name)
            kept.append(node)
    used = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(reversed(kept))
    graph.initializer.extend(used)


def _fix_capacities(graph: onnx.GraphProto, signature: Signature, capacities: Mapping[str, int]) -> None:
    specs = {spec.name: spec for spec in (*signature.inputs, *signature.outputs)}
    for value in (*graph.input, *graph.output):
        for dim, letter in zip(value.type.tensor_type.shape.dim, specs[value.name].shape, strict=True):
            if letter in capacities:
                dim.Clear()
                dim.dim_value = capacities[str(letter)]


def _check(model: onnx.ModelProto, signature: Signature) -> None:
    """Assert what TensorRT would drop or misread in silence is not there, and that the signature has survived."""
    graph = model.graph
    assert [v.name for v in graph.input] == [s.name for s in signature.inputs]
    assert [v.name for v in graph.output] == [s.name for s in signature.outputs]
    assert not [f.name for f in model.functions if f.domain == DOMAIN]
    assert {(node.domain, node.op_type) for node in graph.node if node.domain} <= {
        *((DOMAIN, operator.name) for operator in PLUGINS),
        (TRT_DOMAIN, ATTENTION),
    }
    for node in graph.node:
        # TensorRT drops this input without a word.
        assert not (node.op_type == "Attention" and len(node.input) > 6 and node.input[6]), f"{node.name} has nonpad_kv_seqlen"
    for state in signature.aliases.values():
        readers = [node for node in graph.node if state in node.input]
        assert len(readers) == 1, f"{state} has other readers than its write"
