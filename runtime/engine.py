"""The one seam to a backend: named tensors in, named tensors out, state updated in place.

Knows tensors and graph names. Does not know slots, requests or sampling. Backends: runtime.onnxruntime; tests bring a fake one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.runtime.bundle import Manifest
from dspark.runtime.errors import LimitError, numbered
from dspark.runtime.graphs import MODEL_DTYPE, Signature

Array = NDArray[Any]


class Tensor(Protocol):
    """A tensor that lives where the engine computes."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> Array:
        """Return the values on the host; the array may be the tensor's own memory."""
        ...

    def write(self, values: ArrayLike) -> None:
        """Set the values from the host."""
        ...

    def rows(self, lo: int, size: int) -> Tensor:
        """Return rows lo..lo+size-1 of the first axis, sharing memory."""
        ...


class Step(Protocol):
    """A graph bound to tensors."""

    def run(self) -> None:
        """Compute the outputs; returns when they can be read."""
        ...


class Engine(Protocol):
    """Runs the graphs of one bundle."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def signatures(self) -> Mapping[str, Signature]: ...

    @property
    def run_seconds(self) -> float:
        """Time spent running graphs so far."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Return a tensor of zeros; `dtype` is `int64`, `float32` or `model` (the bundle's)."""
        ...

    def bind(self, graph: str, tensors: Mapping[str, Tensor]) -> Step:
        """Bind all inputs and the outputs that alias none; an aliased output takes its input's tensor.

        Raises LimitError when a shape is not what the graph or the bundle's limits allow.
        """
        ...


def check_binding(graph: str, signature: Signature, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise LimitError with every tensor that is missing, unknown, or of a shape that the graph or the limits refuse."""
    wanted = [s for s in (*signature.inputs, *signature.outputs) if s.name not in signature.aliases]
    faults = [f"{spec.name} is not bound" for spec in wanted if spec.name not in shapes]
    faults += [f"{name} is no tensor of this graph" for name in shapes.keys() - {spec.name for spec in wanted}]
    sizes: dict[str, tuple[int, str]] = {}
    for spec in wanted:
        shape = shapes.get(spec.name)
        if shape is None:
            continue
        if len(shape) != len(spec.shape):
            faults.append(f"{spec.name} has shape {list(shape)}, expected {list(spec.shape)}")
            continue
        for declared, actual in zip(spec.shape, shape, strict=True):
            if isinstance(declared, int):
                if declared != actual:
                    faults.append(f"{spec.name} has shape {list(shape)}, expected {list(spec.shape)}")
                    break
            elif sizes.setdefault(declared, (actual, spec.name))[0] != actual:
                faults.append(f"{spec.name} has {declared} = {actual}, {sizes[declared][1]} has {sizes[declared][0]}")
    if "B" in sizes and not 1 <= sizes["B"][0] <= manifest.limits.max_batch_size:
        faults.append(f"{sizes['B'][0]} rows, the bundle allows 1..{manifest.limits.max_batch_size}")
    most_rows = max(manifest.limits.max_chunk, manifest.num_speculative_tokens + 1)
    if "N" in sizes and not 1 <= sizes["N"][0] <= most_rows:
        faults.append(f"{sizes['N'][0]} new rows, the bundle allows 1..{most_rows}")
    if faults:
        raise LimitError(f"graph {graph} cannot be bound:{numbered(faults)}")


def numpy_dtype(dtype: str, manifest: Manifest) -> np.dtype[Any]:
    """Return the host dtype of a declared dtype."""
    name = {"fp32": "float32", "fp16": "float16"}[manifest.dtype] if dtype == MODEL_DTYPE else dtype
    return np.dtype(name)
