"""Engines by the name of their backend."""

from __future__ import annotations

from dspark.runtime.bundle import Bundle
from dspark.runtime.engine import Engine
from dspark.runtime.errors import EngineError
from dspark.runtime.onnxruntime import OnnxRuntimeEngine


def open_engine(bundle: Bundle, backend: str) -> Engine:
    """Return an engine that runs the bundle here. Raises EngineError saying why it cannot."""
    if backend == "onnxruntime":
        return OnnxRuntimeEngine(bundle)
    raise EngineError(f"{backend} needs a CUDA device, and there is none here")
