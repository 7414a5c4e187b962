"""Launch the kernels of an operator on a CUDA stream.

`prepare` chooses and compiles them for the device when shapes are set, `launch` only launches: no allocation, no synchronisation, no
compilation. cuda-bindings is imported where a device is used. Knows kernels by their `Launch`. Does not know TensorRT.
Shape letters as in `plugins.contract`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dspark.plugins.contract import BLOCK_ATTENTION, RING_WRITE, Operator
from dspark.plugins.rules import PluginError

if TYPE_CHECKING:
    from dspark.plugins.kernels import AttentionShape, Launch

WORKSPACE = "workspace"
"""Name of the scratch memory among a kernel's pointers; the others are the operator's inputs and outputs."""

MOST_MULTIPROCESSORS = 256
"""Work is divided for at most so many, since an engine's scratch memory is fixed where it is built, which may be without the device."""

_KERNEL_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_DEFAULT_SHARED = 48 << 10
"""Bytes of shared memory that a block may have unless its kernel asks for more."""


_loaded: dict[tuple[int | None, str], Any] = {}
_allowed: dict[tuple[int | None, str], int] = {}
"""Kernels by device and name, and the shared memory each is allowed. They stay for the life of the process: captured graphs hold them."""


@dataclass(frozen=True)
class Prepared:
    """A launch with its loaded kernel."""

    launch: Launch
    function: Any


def plan(
    operator: Operator, dtype: str, sizes: Mapping[str, int], attributes: Mapping[str, Any], multiprocessors: int
) -> tuple[Launch, ...]:
    """Return the launches that compute an operator."""
    from dspark.plugins import kernels

    if operator is RING_WRITE:
        return (kernels.ring_write(_KERNEL_DTYPES[dtype], *(sizes[letter] for letter in ("B", "G", "R", "N", "D"))),)
    assert operator is BLOCK_ATTENTION
    most = min(multiprocessors, MOST_MULTIPROCESSORS)
    return kernels.block_attention(_shape(dtype, sizes, attributes), attributes["scale"], most)


def workspace(operator: Operator, dtype: str, sizes: Mapping[str, int], attributes: Mapping[str, Any]) -> int:
    """Return the bytes of scratch memory that an operator needs at most: on any device, and at any batch up to that of `sizes`.

    Small batches are split more, so the largest batch need not need most.
    """
    from dspark.plugins import kernels

    if operator is not BLOCK_ATTENTION:
        return 0
    largest = _shape(dtype, sizes, attributes)
    shapes = (replace(largest, batch=batch) for batch in range(1, largest.batch + 1))
    return max(kernels.block_attention_workspace(shape, MOST_MULTIPROCESSORS) for shape in shapes)


def _shape(dtype: str, sizes: Mapping[str, int], attributes: Mapping[str, Any]) -> AttentionShape:
    from dspark.plugins.kernels import AttentionShape

    return AttentionShape(
        dtype=_KERNEL_DTYPES[dtype],
        batch=sizes["B"],
        heads=sizes["Hq"],
        kv_heads=sizes["G"],
        block=sizes["T"],
        capacity=sizes["R"],
        head_dim=sizes["D"],
        window=attributes["window"],
    )


def prepare(operator: Operator, dtype: str, sizes: Mapping[str, int], attributes: Mapping[str, Any]) -> tuple[Prepared, ...]:
    """Choose, compile and load the kernels of an operator for the current device. Raises PluginError."""
    capability, multiprocessors = device_capability(), _attribute("cudaDevAttrMultiProcessorCount")
    if capability is None or multiprocessors is None:
        raise PluginError(f'{operator.name} needs a CUDA device and cuda-bindings, of which one is missing: pip install "dspark[cuda]"')
    launches = plan(operator, dtype, sizes, attributes, multiprocessors)
    return tuple(Prepared(one, function) for one, function in zip(launches, _functions(launches, capability), strict=True))


def launch(prepared: Sequence[Prepared], addresses: Mapping[str, int], stream: int) -> None:
    """Launch prepared kernels on a stream; `addresses` holds the device memory of each pointer by name. Raises PluginError."""
    from cuda.bindings import driver

    for one in prepared:
        kernel = one.launch
        arguments = kernel.arguments(addresses)
        # The value of a null pointer is None in ctypes.
        values, kinds = tuple(argument.value or 0 for argument in arguments), tuple(type(argument) for argument in arguments)
        _check(
            driver.cuLaunchKernel(one.function, *kernel.grid, *kernel.block, kernel.shared_bytes, stream, (values, kinds), 0), kernel.kernel
        )


def _functions(launches: Sequence[Launch], capability: str) -> list[Any]:
    """Return the loaded kernel of each launch, allowed the shared memory that it needs."""
    from cuda.bindings import driver

    device = _device()
    if any((device, one.kernel) not in _loaded for one in launches):
        _load(launches, device, capability)
    functions = []
    for one in launches:
        function = _loaded[device, one.kernel]
        if one.shared_bytes > _allowed.get((device, one.kernel), _DEFAULT_SHARED):
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, attribute, one.shared_bytes), one.kernel)
            _allowed[device, one.kernel] = one.shared_bytes
        functions.append(function)
    return functions


def _load(launches: Sequence[Launch], device: int | None, capability: str) -> None:
    from cuda.bindings import driver

    from dspark.plugins.compile import compile_kernels

    major, minor = capability.split(".")
    binary = compile_kernels(launches, (int(major), int(minor)))
    (module,) = _check(driver.cuModuleLoadData(binary.cubin), ", ".join(binary.symbols))
    for name, symbol in binary.symbols.items():
        (_loaded[device, name],) = _check(driver.cuModuleGetFunction(module, symbol.encode()), name)


def _check(result: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Return what a driver call gave behind its status. Raises PluginError if that is an error."""
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise PluginError(f"kernel {name}: CUDA says {status.name}")
    return tuple(values)


def device_capability() -> str | None:
    """Return the compute capability of the current device, such as `8.9`; None where there is no device or no cuda-bindings."""
    major, minor = (_attribute(f"cudaDevAttrComputeCapability{part}") for part in ("Major", "Minor"))
    return None if major is None or minor is None else f"{major}.{minor}"


def _attribute(name: str) -> int | None:
    device = _device()
    if device is None:
        return None
    from cuda.bindings import runtime

    status, value = runtime.cudaDeviceGetAttribute(getattr(runtime.cudaDeviceAttr, name), device)
    return int(value) if status == runtime.cudaError_t.cudaSuccess else None


def _device() -> int | None:
    """Return the current device; None where there is none, or no cuda-bindings."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    status, device = runtime.cudaGetDevice()
    return int(device) if status == runtime.cudaError_t.cudaSuccess else None
