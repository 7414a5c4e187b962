"""The one seam to a backend: named tensors in, named tensors out, state updated in place.

Knows tensors and graph names. Does not know slots, requests or sampling. Backends are listed in runtime.backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import ArrayLike, NDArray

from dspark.runtime.bundle import Manifest
from dspark.runtime.errors import LimitError, numbered
from dspark.runtime.graphs import Signature, signatures

Array = NDArray[Any]


class Tensor(Protocol):
    """A tensor that lives where the engine computes."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> Array:
        """Return the values on the host, once everything that was run before is done; the array may be the tensor's own memory."""
        ...

    def write(self, values: ArrayLike) -> None:
        """Set the values from the host."""
        ...

    def copy(self, source: Tensor) -> None:
        """Set the entries that a tensor of the same engine has too; on a device only the source's last axis may be longer."""
        ...

    def rows(self, lo: int, size: int) -> Tensor:
        """Return rows lo..lo+size-1 of the first axis, sharing memory."""
        ...


class Step(Protocol):
    """A graph bound to tensors."""

    def run(self) -> None:
        """Compute the outputs, at the latest when they are read; what is run next sees them."""
        ...


class Engine(Protocol):
    """Runs the graphs of one bundle."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def signatures(self) -> Mapping[str, Signature]: ...

    @property
    def run_seconds(self) -> float:
        """Time spent running graphs so far, and waiting for them."""
        ...

    @property
    def fixed_capacity(self) -> bool:
        """Whether state tensors must have their full capacity from the start; others grow."""
        ...

    def available_memory(self) -> int | None:
        """Return the bytes that tensors can still take, or None where the system does not tell."""
        ...

    def load(self, graphs: Iterable[str]) -> None:
        """Load graphs now instead of when they are first bound. Raises EngineError."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Return a tensor of zeros; `dtype` is `int64`, `float32` or `model` (the bundle's)."""
        ...

    def bind(self, graph: str, tensors: Mapping[str, Tensor]) -> Step:
        """Bind all inputs and the outputs that alias none; an aliased output takes its input's tensor.

        Raises LimitError when a shape is not what the graph or the bundle's limits allow.
        """
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> list[Array]:
        """Read several tensors with one wait; small ones come in one copy."""
        ...


def check_binding(graph: str, signature: Signature, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the size of each shape letter.

    Raises LimitError with every tensor that is missing, unknown, or of a shape that the graph or the limits refuse.
    """
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
    return {letter: size for letter, (size, _) in sizes.items()}


def manifest_signatures(manifest: Manifest) -> dict[str, Signature]:
    """Return the signatures of a bundle's graphs."""
    return signatures(manifest.target, manifest.drafter, manifest.num_speculative_tokens, debug_outputs=manifest.debug_outputs)
