"""The calls of CUDA that the runtime makes, on the first visible device, through cuda-bindings; each raises EngineError where CUDA refuses.

Addresses, streams and graphs are plain numbers and handles. Knows CUDA's names. Does not know tensors; `runtime.device` owns memory.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.errors import EngineError

Bytes = NDArray[np.uint8]

NO_DEVICE = 'pip install "dspark[cuda]" and a driver for CUDA 13 are needed'


class Graph:
    """Recorded work, ready to launch; destroyed when nothing refers to it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class Cuda:
    """CUDA on the first visible device. Raises EngineError without cuda-bindings, driver or device."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise EngineError(f"this backend needs cuda-bindings ({error}): {NO_DEVICE}") from error
        self._api: Any = runtime
        status, count = runtime.cudaGetDeviceCount()
        if status != runtime.cudaError_t.cudaSuccess or not count:
            raise EngineError(f"there is no CUDA device here ({status.name}): {NO_DEVICE}; or use the default backend, onnxruntime")
        # The first visible one: CUDA's current device is each thread's own, and every thread begins with this.
        self.device = 0
        self._call("cudaSetDevice", self.device)
        self.capability = ".".join(str(self._attribute(f"cudaDevAttrComputeCapability{part}")) for part in ("Major", "Minor"))

    def allocate(self, size: int) -> int:
        """Return the address of new device memory."""
        return int(self._call("cudaMalloc", size))

    def free(self, address: int) -> None:
        """Free device memory; what was enqueued before may still use it."""
        self._call("cudaFree", address)

    def host_memory(self, size: int) -> Bytes:
        """Return page-locked host memory, from and to which copies do not wait."""
        address = int(self._call("cudaMallocHost", size))
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        weakref.finalize(memory, self._api.cudaFreeHost, address).atexit = False
        return memory

    def available_memory(self) -> int:
        """Return the free bytes of the device."""
        free, _ = self._call("cudaMemGetInfo")
        return int(free)

    def stream(self) -> int:
        """Return a new stream that does not wait for the default one."""
        return int(self._call("cudaStreamCreateWithFlags", self._api.cudaStreamNonBlocking))

    def synchronize(self, stream: int) -> None:
        """Wait for everything on a stream."""
        self._call("cudaStreamSynchronize", stream)

    def copy_in(self, address: int, host: Bytes, stream: int) -> None:
        """Copy page-locked host memory to the device."""
        self._copy(address, host.ctypes.data, host.nbytes, "HostToDevice", stream)

    def copy_out(self, host: Bytes, address: int, stream: int) -> None:
        """Copy device memory to page-locked host memory, which holds it once the stream is synchronized."""
        self._copy(host.ctypes.data, address, host.nbytes, "DeviceToHost", stream)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy inside the device."""
        self._copy(target, source, size, "DeviceToDevice", stream)

    def copy_rows(self, target: int, width: int, source: int, source_pitch: int, rows: int, stream: int) -> None:
        """Copy the first `width` bytes of `rows` rows that lie `source_pitch` bytes apart, packed, inside the device."""
        kind = self._api.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call("cudaMemcpy2DAsync", target, width, source, source_pitch, width, rows, kind, stream)

    def clear(self, address: int, size: int, stream: int) -> None:
        """Set bytes to zero."""
        self._call("cudaMemsetAsync", address, 0, size, stream)

    def begin_capture(self, stream: int) -> None:
        """Record what follows on the stream instead of running it."""
        self._call("cudaStreamBeginCapture", stream, self._api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)

    def end_capture(self, stream: int) -> Graph:
        """Return what was recorded."""
        recorded = self._call("cudaStreamEndCapture", stream)
        try:
            handle = self._call("cudaGraphInstantiate", recorded, 0)
        finally:
            self._call("cudaGraphDestroy", recorded)
        graph = Graph(handle)
        weakref.finalize(graph, self._api.cudaGraphExecDestroy, handle).atexit = False
        return graph

    def launch(self, graph: Graph, stream: int) -> None:
        """Run a graph on a stream."""
        self._call("cudaGraphLaunch", graph.handle, stream)

    def _copy(self, target: int, source: int, size: int, kind: str, stream: int) -> None:
        self._call("cudaMemcpyAsync", target, source, size, getattr(self._api.cudaMemcpyKind, f"cudaMemcpy{kind}"), stream)

    def _attribute(self, name: str) -> int:
        return int(self._call("cudaDeviceGetAttribute", getattr(self._api.cudaDeviceAttr, name), self.device))

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._api, name)(*arguments)
        if status != self._api.cudaError_t.cudaSuccess:
            _, text = self._api.cudaGetErrorString(status)
            raise EngineError(f"{name} failed: {status.name} ({text.decode()})")
        return values[0] if len(values) == 1 else values
