"""The part of cuda-bindings that `dspark.plugins.launch` uses, over libcuda with ctypes, for machines that lack the package.

Functions are called, and answer, as in `cuda.bindings.driver` and `.runtime`: a tuple that begins with the status. Knows the driver's C
interface; not the kernels.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

_HANDLE, _INT, _UNSIGNED = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint

_SIGNATURES: dict[str, list[Any]] = {
    "cuGetErrorName": [_INT, ctypes.POINTER(ctypes.c_char_p)],
    "cuCtxGetDevice": [ctypes.POINTER(_INT)],
    "cuDeviceGetAttribute": [ctypes.POINTER(_INT), _INT, _INT],
    "cuModuleLoadData": [ctypes.POINTER(_HANDLE), ctypes.c_char_p],
    "cuModuleGetFunction": [ctypes.POINTER(_HANDLE), _HANDLE, ctypes.c_char_p],
    "cuFuncSetAttribute": [_HANDLE, _INT, _INT],
    "cuLaunchKernel": [_HANDLE, *[_UNSIGNED] * 7, _HANDLE, ctypes.POINTER(_HANDLE), ctypes.POINTER(_HANDLE)],
}


class Status(int):
    """A CUresult."""

    name: str = "CUDA_SUCCESS"


class Driver:
    """Calls of the driver; `library` is a loaded libcuda."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=Status(0))
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    cudaError_t = SimpleNamespace(cudaSuccess=Status(0))
    cudaDeviceAttr = SimpleNamespace(
        cudaDevAttrMultiProcessorCount=16, cudaDevAttrComputeCapabilityMajor=75, cudaDevAttrComputeCapabilityMinor=76
    )

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _SIGNATURES.items():
            getattr(library, name).argtypes = arguments

    def cudaGetDevice(self) -> tuple[Status, int]:
        device = _INT()
        return self._status(self._library.cuCtxGetDevice(ctypes.byref(device))), device.value

    def cudaDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Status, int]:
        value = _INT()
        return self._status(self._library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)), value.value

    def cuModuleLoadData(self, image: bytes) -> tuple[Status, int | None]:
        module = _HANDLE()
        return self._status(self._library.cuModuleLoadData(ctypes.byref(module), image)), module.value

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Status, int | None]:
        function = _HANDLE()
        return self._status(self._library.cuModuleGetFunction(ctypes.byref(function), module, name)), function.value

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> tuple[Status]:
        return (self._status(self._library.cuFuncSetAttribute(function, attribute, value)),)

    def cuLaunchKernel(self, function: int, *rest: Any) -> tuple[Status]:
        *sizes, stream, (values, kinds), _extra = rest
        arguments = [kind(value) for kind, value in zip(kinds, values, strict=True)]
        pointers = (_HANDLE * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        return (self._status(self._library.cuLaunchKernel(function, *sizes, stream, pointers, None)),)

    def _status(self, code: int) -> Status:
        status = Status(code)
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            status.name = (name.value or b"unknown error").decode()
        return status


def install(library: str = "libcuda.so.1") -> None:
    """Make `cuda.bindings` importable where it is not installed."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        substitute(Driver(ctypes.CDLL(library)))


def substitute(driver: Driver) -> None:
    """Put a driver in the place of `cuda.bindings.driver` and `.runtime`."""
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = bindings.runtime = driver
    modules: dict[str, Any] = {"cuda": ModuleType("cuda"), "cuda.bindings": bindings}
    sys.modules.update(modules | {"cuda.bindings.driver": driver, "cuda.bindings.runtime": driver})
