"""Checks on exported graphs: what the runtime relies on, and what onnx.checker cannot see when weights lie elsewhere.

Knows onnx-ir models and signatures.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir

from dspark.export.lower_weights import NBITS, NBITS_DOMAIN
from dspark.plugins.contract import BLOCK_ATTENTION, DOMAIN, OPERATORS, RING_WRITE
from dspark.runtime.errors import ExportError
from dspark.runtime.graphs import Signature


def check_graph(model: ir.Model, signature: Signature) -> None:
    """Assert our own invariants: names, domains, functions, plugin attributes, and one reader of each state input.

    ONNX Runtime writes a state tensor in place only where the write node is the sole consumer of the state input.
    """
    graph = model.graph
    assert [v.name for v in graph.inputs] == [s.name for s in signature.inputs]
    assert [v.name for v in graph.outputs] == [s.name for s in signature.outputs]
    called = {node.op_type for node in graph if node.domain == DOMAIN}
    assert {node.domain for node in graph} <= {"", DOMAIN, NBITS_DOMAIN}
    assert {node.op_type for node in graph if node.domain == NBITS_DOMAIN} <= {NBITS}
    assert called <= {operator.name for operator in OPERATORS}
    assert called == {name for domain, name, _ in model.functions if domain == DOMAIN}
    inputs = {value.name: value for value in graph.inputs}
    for output in graph.outputs:
        if output.name not in signature.aliases:
            continue
        writer = output.producer()
        state = inputs[signature.aliases[output.name]]
        assert writer is not None
        assert writer.op_type in (RING_WRITE.name, "TensorScatter")
        assert writer.inputs[0] is state
        assert [use.node for use in state.uses()] == [writer], f"{state.name} has other readers than its write"
    for node in graph:
        if node.domain == DOMAIN and node.op_type in (RING_WRITE.name, BLOCK_ATTENTION.name):
            assert node.attributes["plugin_namespace"].as_string() == DOMAIN


def check_references(model: ir.Model, proto: onnx.ModelProto, root: str) -> None:
    """Check a graph whose weights lie in checkpoint files: onnx.checker on the graph with weights as inputs, then their places.

    onnx.checker refuses locations outside the model's own folder, so names, offsets and lengths are checked here.
    """
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        path = Path(root) / os.fspath(tensor.location)
        assert tensor.offset is not None and tensor.length is not None
        assert tensor.length == tensor.nbytes, f"{name} maps {tensor.length} bytes, its shape and dtype need {tensor.nbytes}"
        if path.is_symlink() or not path.is_file() or tensor.offset + tensor.length > path.stat().st_size:
            raise ExportError(f"{name} does not lie in {path}: the checkpoint changed during the export, run it again")
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    external = [t for t in bare.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    for tensor in external:
        bare.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        bare.graph.initializer.remove(tensor)
    onnx.checker.check_model(bare, full_check=True)
