"""The backends by name, and opening a bundle with one. Knows names only; each backend's packages are imported when it is opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dspark.runtime.bundle import Bundle
from dspark.runtime.engines import FLAVOURS
from dspark.runtime.errors import EngineError

if TYPE_CHECKING:
    from dspark.runtime.engine import Engine

ONNXRUNTIME, ONNXRUNTIME_CUDA = "onnxruntime", "onnxruntime-cuda"
BACKENDS = (ONNXRUNTIME, ONNXRUNTIME_CUDA, *FLAVOURS)


def open_engine(bundle: Bundle, backend: str = ONNXRUNTIME, *, threads: int | None = None, prepacked: Path | None = None) -> Engine:
    """Return an engine that runs a bundle's graphs; `threads` are those of the CPU, `prepacked` is a cache folder for its packed weights.

    Raises EngineError when the backend is unknown, not installed, or cannot run this bundle here.
    """
    if backend not in BACKENDS:
        raise EngineError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend != ONNXRUNTIME and (threads is not None or prepacked is not None):
        raise EngineError(f"threads and the cache of packed weights are for the backend {ONNXRUNTIME}, not for {backend}: leave them out")
    if backend == ONNXRUNTIME:
        from dspark.runtime.onnxruntime import OnnxRuntimeEngine

        return OnnxRuntimeEngine(bundle, threads=threads, prepacked=prepacked)
    if backend == ONNXRUNTIME_CUDA:
        from dspark.runtime.cuda_provider import CudaProviderEngine

        return CudaProviderEngine(bundle)
    from dspark.runtime.tensorrt import TensorRTEngine

    return TensorRTEngine(bundle, backend)
