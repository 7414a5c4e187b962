"""Tensors in device memory and the one stream that everything runs on.

Nothing waits until a value is read. What the host writes passes through a page-locked buffer that is used again only when the stream
has caught up. Small tensors lie together, so that several are read by one copy. bfloat16, which numpy lacks, is float32 on the host.
Knows memory and order. Does not know graphs.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dspark.runtime.cuda import Cuda
from dspark.runtime.engine import Array, Tensor

ALIGNMENT = 256
"""Bytes; TensorRT wants it of the tensors it is given."""
_SLAB = 1 << 18
"""Bytes of device memory that small tensors share, those of some sixty slot ranges; a read of several copies at most this."""
_SMALL = 1 << 14
_STAGING = 4 << 20

_WIDTHS = {"fp32": np.float32, "float32": np.float32, "fp16": np.float16, "int64": np.int64, "bf16": np.uint16}
"""How each dtype lies in memory."""


class Memory:
    """A piece of device memory, given back when nothing refers to it."""

    def __init__(self, address: int, slab: Memory | None = None) -> None:
        self.address, self.slab = address, slab


class _Unused:
    """What nothing refers to any more, until the stream has caught up: work may use it, and CUDA frees nothing during a capture."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self._addresses, self.objects = cuda, list[int](), list[Any]()
        self._closed = False

    def add(self, address: int) -> None:
        """Free memory, now or at the next `release`."""
        if self._closed:
            self._cuda.free(address)
        else:
            self._addresses.append(address)

    def release(self) -> None:
        """Free everything."""
        self.objects.clear()
        while self._addresses:
            self._cuda.free(self._addresses.pop())

    def close(self) -> None:
        """Free everything, and from now on at once."""
        self._closed = True
        self.release()


class Device:
    """Memory and the stream of one engine."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.stream = cuda, cuda.stream()
        self._unused = _Unused(cuda)
        weakref.finalize(self, self._unused.close).atexit = False
        self.wait_seconds = 0.0
        """Time that the host waited for the stream."""
        self._staging, self._staged = cuda.host_memory(_STAGING), 0
        self._landing = cuda.host_memory(_STAGING)
        self._slab, self._used = self.memory(_SLAB), 0
        self._blocks: dict[int, list[tuple[Memory, int]]] = {}

    def memory(self, size: int) -> Memory:
        """Return device memory that is freed when nothing refers to the object, and the stream has caught up."""
        memory = Memory(self.cuda.allocate(size))
        weakref.finalize(memory, self._unused.add, memory.address).atexit = False
        return memory

    def retire(self, *objects: Any) -> None:
        """Keep objects that enqueued work may need until the stream has caught up."""
        self._unused.objects += [item for item in objects if item is not None]

    def tensor(self, shape: tuple[int, ...], dtype: str) -> DeviceTensor:
        """Return a tensor of zeros; `dtype` is one of a bundle's or `int64` or `float32`."""
        size = math.prod(shape) * np.dtype(_WIDTHS[dtype]).itemsize
        rounded = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        memory = self.memory(rounded) if rounded > _SMALL else self._block(rounded)
        made = DeviceTensor(self, memory, memory.address, shape, dtype)
        made.write(0)
        return made

    def _block(self, size: int) -> Memory:
        """Return a block of a slab; a tensor of the same size takes its place when nothing refers to it."""
        blocks = self._blocks.setdefault(size, [])
        if not blocks:
            if self._used + size > _SLAB:
                self._slab, self._used = self.memory(_SLAB), 0
            blocks.append((self._slab, self._slab.address + self._used))
            self._used += size
        slab, address = blocks.pop()
        memory = Memory(address, slab)
        weakref.finalize(memory, blocks.append, (slab, address)).atexit = False
        return memory

    def send(self, address: int, values: Array) -> None:
        """Copy contiguous host values to the device; they may change as soon as this returns."""
        rest = values.reshape(-1).view(np.uint8)
        while rest.nbytes:
            if self._staged == _STAGING:
                self.synchronize()
            piece = rest[: _STAGING - self._staged]
            place = self._staging[self._staged : self._staged + piece.nbytes]
            place[:] = piece
            self.cuda.copy_in(address, place, self.stream)
            self._staged += piece.nbytes
            address, rest = address + piece.nbytes, rest[piece.nbytes :]

    def receive(self, address: int, size: int) -> Array:
        """Return `size` bytes of device memory, when everything before has run."""
        values = np.empty(size, np.uint8)
        for begin in range(0, size, _STAGING):
            piece = self._landing[: min(_STAGING, size - begin)]
            self.cuda.copy_out(piece, address + begin, self.stream)
            self.synchronize()
            values[begin : begin + piece.nbytes] = piece
        return values

    def fetch(self, tensors: Sequence[DeviceTensor]) -> list[Array]:
        """Return the values of several tensors: small ones by one copy and one wait."""
        slab = tensors[0].memory.slab
        if slab is None or any(tensor.memory.slab is not slab for tensor in tensors):
            return [tensor.read() for tensor in tensors]
        begin = min(tensor.address for tensor in tensors)
        values = self.receive(begin, max(tensor.address + tensor.nbytes for tensor in tensors) - begin)
        return [tensor.decoded(values[tensor.address - begin :][: tensor.nbytes]) for tensor in tensors]

    def synchronize(self) -> None:
        """Wait for the stream; what was staged has then been copied."""
        began = time.perf_counter()
        self.cuda.synchronize(self.stream)
        self.wait_seconds += time.perf_counter() - began
        self._staged = 0
        self._unused.release()


class DeviceTensor:
    """A tensor in device memory; rows of it share the memory and keep it."""

    def __init__(self, device: Device, memory: Memory, address: int, shape: tuple[int, ...], dtype: str) -> None:
        self._device, self.memory = device, memory
        self.address, self.shape, self.dtype = address, shape, dtype
        self._width: np.dtype[Any] = np.dtype(_WIDTHS[dtype])
        self.nbytes = math.prod(shape) * self._width.itemsize

    def read(self) -> Array:
        return self.decoded(self._device.receive(self.address, self.nbytes))

    def write(self, values: ArrayLike) -> None:
        if np.ndim(values) == 0 and not values:
            self._device.cuda.clear(self.address, self.nbytes, self._device.stream)
            return
        host = np.float32 if self.dtype == "bf16" else self._width
        array = np.ascontiguousarray(np.broadcast_to(np.asarray(values, host), self.shape))
        self._device.send(self.address, _bfloat16(array) if self.dtype == "bf16" else array)

    def copy(self, source: Tensor) -> None:
        assert isinstance(source, DeviceTensor) and source.dtype == self.dtype and source.shape[:-1] == self.shape[:-1]
        device, width, pitch = self._device, self.shape[-1] * self._width.itemsize, source.shape[-1] * self._width.itemsize
        if width == pitch:
            device.cuda.copy(self.address, source.address, self.nbytes, device.stream)
        else:
            device.cuda.copy_rows(self.address, width, source.address, pitch, math.prod(self.shape[:-1]), device.stream)

    def rows(self, lo: int, size: int) -> DeviceTensor:
        stride = self.nbytes // self.shape[0]
        return DeviceTensor(self._device, self.memory, self.address + lo * stride, (size, *self.shape[1:]), self.dtype)

    def decoded(self, values: Array) -> Array:
        """Return host values from the bytes of this tensor."""
        array = values.view(self._width).reshape(self.shape)
        return (array.astype(np.uint32) << 16).view(np.float32) if self.dtype == "bf16" else array


def _bfloat16(values: Array) -> Array:
    """Return float32 values as the bits of bfloat16, rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
