"""Polygraphy runners over any engine of the runtime: one graph each, on rings and caches that the runners of an engine share.

A call is fed what is no state; the state goes from call to call inside the engine and is read back as outputs. Knows names and arrays;
not what is compared. B batch rows, N new rows, R ring capacity, S cache capacity.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from dspark.runtime.engine import Array, Engine
from dspark.runtime.graphs import MODEL_DTYPE, Signature, TensorSpec
from dspark.runtime.state import State, View


class Memory:
    """An engine with the rings and caches of a batch of `batch` requests."""

    def __init__(self, engine: Engine, batch: int) -> None:
        manifest = self._manifest = engine.manifest
        self.engine, self.view = engine, View(0, batch, tuple(range(batch)))
        self._rings = State(engine, "ring", manifest.drafter, batch, manifest.ring_capacity)
        self._caches = State(engine, "cache", manifest.target, batch, manifest.cache_capacity)

    def of(self, signature: Signature) -> tuple[State, int] | None:
        """Return the state that a graph updates and its largest capacity; None for a graph without state."""
        if not signature.aliases:
            return None
        is_ring = "R" in signature.inputs[-1].shape
        return (self._rings, self._manifest.ring_capacity) if is_ring else (self._caches, self._manifest.cache_capacity)


class EngineRunner(BaseRunner):
    """Runs one graph on an engine. Floating point tensors are float32 outside, whatever the engine's dtype."""

    def __init__(self, name: str, memory: Memory, graph: str) -> None:
        super().__init__(name=name)
        self._memory, self._graph = memory, graph
        self._signature = memory.engine.signatures[graph]
        self._states = set(self._signature.aliases.values())

    def get_input_metadata_impl(self) -> TensorMetadata:
        metadata = TensorMetadata()
        for spec in self._signature.inputs:
            if spec.name not in self._states:
                shape = tuple(dim if isinstance(dim, int) else None for dim in spec.shape)
                metadata.add(spec.name, np.int64 if spec.dtype == "int64" else np.float32, shape)
        return metadata

    def infer_impl(self, feed_dict: Mapping[str, Array]) -> dict[str, Array]:
        """Run the graph; return its outputs, of the state those rows that a call so far may have written."""
        engine, signature = self._memory.engine, self._signature
        sizes = {
            letter: size
            for spec in signature.inputs
            if spec.name in feed_dict
            for letter, size in zip(spec.shape, feed_dict[spec.name].shape, strict=True)
        }
        tensors = {}
        for spec in (*signature.inputs, *signature.outputs):
            if spec.name not in self._states and spec.name not in signature.aliases:
                tensors[spec.name] = engine.allocate(tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape), spec.dtype)
        for name, values in feed_dict.items():
            tensors[name].write(values)
        rows, held = 0, self._memory.of(signature)
        if held is not None:
            state, capacity = held
            rows = min(capacity, int(np.max(feed_dict["start"])) + sizes["N"])
            state.reserve(self._memory.view.size, rows)
            tensors |= state.tensors(self._memory.view)
        step = engine.bind(self._graph, tensors)
        began = time.perf_counter()
        step.run()
        self.inference_time = time.perf_counter() - began
        return {
            spec.name: self._read(tensors[signature.aliases.get(spec.name, spec.name)].read(), spec, rows) for spec in signature.outputs
        }

    def _read(self, values: Array, spec: TensorSpec, rows: int) -> Array:
        """Return a copy: the next call writes to the same memory."""
        shown = values[:, :, :rows] if spec.name in self._signature.aliases else values
        return np.array(shown, np.float32) if spec.dtype == MODEL_DTYPE else np.array(shown)
