"""Engine on ONNX Runtime's CUDA provider: the CPU engine's graphs, with tensors in device memory.

Sessions run on the stream of `runtime.device`. ONNX Runtime falls back to the CPU without an error; here that is one.
Knows sessions and addresses. Does not know slots, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from dspark.runtime.bundle import Bundle
from dspark.runtime.cuda import Cuda
from dspark.runtime.device import Device, DeviceTensor
from dspark.runtime.engine import Array, Tensor
from dspark.runtime.errors import EngineError
from dspark.runtime.graphs import MODEL_DTYPE, Signature
from dspark.runtime.onnxruntime import OnnxRuntimeEngine

INSTALL = 'pip uninstall -y onnxruntime onnxruntime-gpu && pip install "dspark[onnxruntime-gpu]"'
_BFLOAT16 = 16
"""ONNX's number of the dtype that numpy lacks."""
_ELEMENTS = {"fp32": np.float32, "float32": np.float32, "fp16": np.float16, "int64": np.int64, "bf16": _BFLOAT16}


class CudaProviderEngine(OnnxRuntimeEngine):
    """Runs a bundle's graphs with ONNX Runtime on a CUDA device. Raises EngineError without one, or without onnxruntime-gpu."""

    fixed_capacity = True
    provider = "CUDAExecutionProvider"
    device_type = "cuda"

    def __init__(self, bundle: Bundle, *, log_severity: int = 3, cuda: Cuda | None = None) -> None:
        super().__init__(bundle, log_severity=log_severity)
        self._cuda = cuda or Cuda()
        self._device = Device(self._cuda)

    @property
    def run_seconds(self) -> float:
        return self.session_seconds + self._device.wait_seconds

    def available_memory(self) -> int | None:
        return self._cuda.available_memory()

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return self._device.tensor(shape, self.manifest.dtype if dtype == MODEL_DTYPE else dtype)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Array]:
        return self._device.fetch([tensor for tensor in tensors if isinstance(tensor, DeviceTensor)])

    def bound(self, binding: Any, signature: Signature, tensors: Mapping[str, Tensor]) -> Any:
        """Bind the addresses of tensors to a session's inputs and outputs."""

        def place(name: str) -> tuple[Any, ...]:
            tensor = tensors[name]
            assert isinstance(tensor, DeviceTensor), "a tensor of another engine"
            return self.device_type, self._cuda.device, _ELEMENTS[tensor.dtype], list(tensor.shape), tensor.address

        for spec in signature.inputs:
            binding.bind_input(spec.name, *place(spec.name))
        for spec in signature.outputs:
            binding.bind_output(spec.name, *place(signature.aliases.get(spec.name, spec.name)))
        return binding

    def _check_dtype(self, bundle: Bundle) -> None:
        pass

    def _providers(self) -> list[Any]:
        # TF32 has 11 bits: float32 products are to be float32, as they are on every other engine.
        return [(self.provider, {"device_id": self._cuda.device, "user_compute_stream": str(self._device.stream), "use_tf32": "0"})]

    def run_options(self) -> Any:
        """Let a run only enqueue: the stream is waited for where a value is read."""
        import onnxruntime

        options = onnxruntime.RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options

    def _load(self, graph: str) -> Any:
        session = super()._load(graph)
        used = session.get_providers()
        if used[0] != self.provider:
            raise EngineError(f"ONNX Runtime fell back to {used[0]}, expected {self.provider}; {_installed()}: {INSTALL}")
        return session


def _installed() -> str:
    """Say which packages of ONNX Runtime are installed; they share one folder, so two of them spoil each other."""
    found = []
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"installed: {' and '.join(found)}, expected onnxruntime-gpu alone, with CUDA and cuDNN"
