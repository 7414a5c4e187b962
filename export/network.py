"""Parse a lowered graph into a TensorRT network and make sure that it is what we meant: layers, names, dtypes and shapes.

TensorRT inlines, decomposes or drops what it does not recognise, often in silence; here every such case is an error.
Knows TensorRT's parser and network. Does not know profiles nor files.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx

from dspark.plugins import registry
from dspark.plugins.contract import BLOCK_ATTENTION, RING_WRITE
from dspark.plugins.rules import PluginError
from dspark.runtime.config import DrafterConfig, TargetConfig
from dspark.runtime.errors import EngineError, numbered
from dspark.runtime.flavour import DTYPES, make_log
from dspark.runtime.graphs import CONTEXT, DRAFT, DRAFT_SAMPLED, MODEL_DTYPE, TARGET, Signature

PLUGIN, CACHE_UPDATE, ATTENTION = "PLUGIN_V3", "KV_CACHE_UPDATE", "ATTENTION_OUTPUT"
"""Kinds of TensorRT layers that are counted; the attention layer has an input and an output part."""


def expected_layers(graph: str, target: TargetConfig, drafter: DrafterConfig) -> dict[str, int]:
    """Return how many of each counted layer a graph must have: plugins by operator, TensorRT's own by kind."""
    expected = {}
    if graph in (CONTEXT, DRAFT, DRAFT_SAMPLED):
        expected[RING_WRITE.name] = 2 * drafter.num_hidden_layers
    if graph in (DRAFT, DRAFT_SAMPLED):
        expected[BLOCK_ATTENTION.name] = drafter.num_hidden_layers
    if graph == TARGET:
        expected |= {CACHE_UPDATE: 2 * target.num_hidden_layers, ATTENTION: target.num_hidden_layers}
    return expected


class Network:
    """A parsed network with the builder, parser and log that it needs."""

    def __init__(self, trt: Any, graph: str, *, plugins: bool = True) -> None:
        self.trt, self.graph = trt, graph
        if plugins:
            registry.register(trt)
        self.log = make_log(trt)
        self.builder = trt.Builder(self.log)
        flags = trt.NetworkDefinitionCreationFlag
        # TensorRT 10 wants the flag; 11 and RTX are always strongly typed, and some of their releases lack it.
        typed = 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0
        self.definition = self.builder.create_network(typed)
        self._parser = trt.OnnxParser(self.definition, self.log)

    def parse(self, model: onnx.ModelProto, folder: Path, signature: Signature, dtype: str, expected: dict[str, int]) -> None:
        """Parse a lowered model whose weights lie below `folder`. Raises EngineError if anything is not as meant."""
        if {RING_WRITE.name, BLOCK_ATTENTION.name} & expected.keys():
            try:
                registry.check_registered(self.trt)
            except PluginError as error:
                raise EngineError(f"graph {self.graph}: {error}") from error
        registry.faults.clear()
        if not self._parser.parse(model.SerializeToString(), str(folder / f"{self.graph}.onnx")):
            errors = [self._parser.get_error(i) for i in range(self._parser.num_errors)]
            told = [f"{e.node_name()} ({e.node_operator()}): {e.desc()}" for e in errors]
            faults = dict.fromkeys([*registry.faults, *told, *self.log.errors])
            raise EngineError(f"{self.trt.__name__} {self.trt.__version__} does not parse graph {self.graph}:{numbered(faults)}")
        faults_found = [*self._layer_faults(expected), *self._tensor_faults(signature, dtype)]
        if faults_found:
            raise EngineError(f"{self.trt.__name__} {self.trt.__version__} misreads graph {self.graph}:{numbered(faults_found)}")

    def layers(self) -> Counter[str]:
        """Count the layers: plugins by operator, others by kind."""
        found: Counter[str] = Counter()
        for i in range(self.definition.num_layers):
            layer = self.definition.get_layer(i)
            # Layers are named after the ONNX nodes, and these after their operators.
            found[layer.name.split(".")[0] if layer.type.name == PLUGIN else layer.type.name] += 1
        return found

    def _layer_faults(self, expected: dict[str, int]) -> list[str]:
        found = self.layers()
        counted = (RING_WRITE.name, BLOCK_ATTENTION.name, CACHE_UPDATE, ATTENTION)
        return [
            f"{found[kind]} layers of kind {kind}, expected {expected.get(kind, 0)}"
            for kind in counted
            if found[kind] != expected.get(kind, 0)
        ]

    def _tensor_faults(self, signature: Signature, dtype: str) -> list[str]:
        net = self.definition
        tensors = {t.name: t for t in (net.get_input(i) for i in range(net.num_inputs))}
        tensors |= {t.name: t for t in (net.get_output(i) for i in range(net.num_outputs))}
        faults = []
        for spec in (*signature.inputs, *signature.outputs):
            tensor = tensors.get(spec.name)
            if tensor is None:
                faults.append(f"{spec.name} is missing")
                continue
            wanted = DTYPES[dtype if spec.dtype == MODEL_DTYPE else spec.dtype]
            if tensor.dtype.name != wanted:
                faults.append(f"{spec.name} has dtype {tensor.dtype.name}, expected {wanted}")
            shape = tuple(tensor.shape)
            fits = len(shape) == len(spec.shape) and all(isinstance(d, str) or d == s for d, s in zip(spec.shape, shape, strict=True))
            if not fits:
                faults.append(f"{spec.name} has shape {shape}, expected {spec.shape}")
        return faults
