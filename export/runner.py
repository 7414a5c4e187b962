"""Polygraphy runners over any engine of the runtime: one graph each, on rings and caches that the runners of an engine share.

A call is fed what is no state; the state goes from call to call inside the engine and is read back as outputs. Knows names and arrays;
not what is compared. B batch rows, N new rows, R ring capacity.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from dspark.runtime.engine import Array, Engine, Tensor
from dspark.runtime.graphs import MODEL_DTYPE, Signature, TensorSpec
from dspark.runtime.state import State, View

_NEVER = 1 << 62


class Memory:
    """An engine with the rings and caches of a batch of requests, and which positions of them calls have written."""

    def __init__(self, engine: Engine, batch: int) -> None:
        manifest = engine.manifest
        self.engine, self._view = engine, View(0, batch, tuple(range(batch)))
        self._held = {
            kind: _Held(State(engine, kind, config, batch, capacity), capacity, np.full(batch, _NEVER), np.zeros(batch, np.int64))
            for kind, config, capacity in (
                ("ring", manifest.drafter, manifest.ring_capacity),
                ("cache", manifest.target, manifest.cache_capacity),
            )
        }

    def reserve(self, signature: Signature, start: Array, rows: int) -> dict[str, Tensor]:
        """Make room for `rows` rows from positions `start [B]` on; return the state tensors of a graph by input name."""
        held = self._held[_kind(signature)]
        held.first, held.end = np.minimum(held.first, start), np.maximum(held.end, start + rows)
        held.state.reserve(self._view.size, min(held.capacity, int(held.first.max()) + held.span))
        return held.state.tensors(self._view)

    def written(self, signature: Signature) -> Array:
        """Return the slots `[B,n]` of each request's positions from the first written one on; n is the largest number of them."""
        held = self._held[_kind(signature)]
        return (held.first[:, None] + np.arange(held.span)) % held.capacity


@dataclass
class _Held:
    """Rings or caches, and per request the first position that was written and the one behind the last."""

    state: State
    capacity: int
    first: Array
    end: Array

    @property
    def span(self) -> int:
        return min(self.capacity, int((self.end - self.first).max()))


def _kind(signature: Signature) -> str:
    """Return which state a graph updates."""
    return "ring" if "R" in signature.inputs[-1].shape else "cache"


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
        """Run the graph; return its outputs, of the state the rows that calls so far have written."""
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
        if signature.aliases:
            tensors |= self._memory.reserve(signature, feed_dict["start"], sizes["N"])
        step = engine.bind(self._graph, tensors)
        began = time.perf_counter()
        step.run()
        self.inference_time = time.perf_counter() - began
        return {spec.name: self._read(tensors[signature.aliases.get(spec.name, spec.name)], spec) for spec in signature.outputs}

    def _read(self, tensor: Tensor, spec: TensorSpec) -> Array:
        """Return a copy: the next call writes to the same memory."""
        values = tensor.read()
        if spec.name in self._signature.aliases:
            values = np.take_along_axis(values, self._memory.written(self._signature)[:, None, :, None], 2)
        return np.array(values, np.float32) if spec.dtype == MODEL_DTYPE else np.array(values)
