"""Which engines of a bundle can run on this machine, why the others cannot, and which of all is the reference.

Knows backends by name. Does not know how engines are compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from dspark.runtime.backend import ONNXRUNTIME, ONNXRUNTIME_CUDA, open_engine
from dspark.runtime.bundle import Bundle
from dspark.runtime.engine import Engine
from dspark.runtime.errors import EngineError, ExportError
from dspark.runtime.graphs import GRAPHS

TORCH = "torch"


def open_reference(bundle: Bundle) -> tuple[str, Engine]:
    """Return the name of the reference and its engine: torch in float32, or, without torch, ONNX Runtime for a float32 bundle.

    Raises ExportError for a bundle of another dtype without torch.
    """
    try:
        from dspark.export.eager import EagerEngine
    except ImportError as error:
        if bundle.manifest.dtype == "fp32":
            return ONNXRUNTIME, open_engine(bundle, ONNXRUNTIME)
        raise ExportError(
            f"{bundle.directory} is a {bundle.manifest.dtype} bundle: what it is compared with is the float32 form of its weights, which "
            f'torch computes ({error}): pip install "dspark[export]"'
        ) from error
    return TORCH, EagerEngine(bundle)


def open_engines(bundle: Bundle) -> tuple[dict[str, Engine], Mapping[str, str]]:
    """Return the engines that can run here by backend, and the reason for each that cannot."""
    engines: dict[str, Engine] = {}
    reasons: dict[str, str] = {}
    compiled: dict[str, list[str]] = {}
    for record in bundle.manifest.engines.values():
        compiled.setdefault(record.flavour, []).append(record.compute_capability)
    for backend in (ONNXRUNTIME, ONNXRUNTIME_CUDA, *compiled):
        try:
            engine = open_engine(bundle, backend)
            engine.load(GRAPHS)
            engines[backend] = engine
        except EngineError as error:
            made_for = f"compiled for {', '.join(compiled[backend])}; " if backend in compiled else ""
            reasons[backend] = f"{made_for}{error}"
    return engines, reasons
