"""The CUDA kernels by name and what a launch of each needs: entry point, grid, block, shared memory, arguments in order.

Knows how the kernels divide their work, in step with the .cuh files; not who compiles or launches them. A TensorRT plugin, the CPU
emulation and a script with nothing but the driver launch through `Launch` alike. Standard library only.

B requests   G key/value heads   Hq query heads   T block rows   R ring capacity   D head dimension   M query rows of a key/value head
S pieces (splits) of a request's keys
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent

HEAD_DIMS = (64, 80, 96, 128, 256)

ELEMENTS = {"float32": ("float", 4), "float16": ("dspark::float16", 2), "bfloat16": ("dspark::bfloat16", 2)}
"""C++ type and bytes of one element by dtype."""

C_TYPES: dict[str, type[ctypes.c_int] | type[ctypes.c_longlong] | type[ctypes.c_float]] = {
    "int": ctypes.c_int,
    "long long": ctypes.c_longlong,
    "float": ctypes.c_float,
}

_THREADS = 128
_WARP = 32
_VECTOR_BYTES = 16
_ROW_STEP = 16
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Scalar:
    """One argument passed by value."""

    name: str
    c_type: str
    value: int | float


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `kernel` is a C++ name expression declared in the header `source`; pointers come before scalars.

    Blocks may need more than 48 KiB of dynamic shared memory: the launcher then sets the kernel's attribute first.
    """

    source: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    pointers: tuple[str, ...]
    scalars: tuple[Scalar, ...]

    def arguments(self, addresses: Mapping[str, int]) -> list[ctypes.c_void_p | ctypes.c_int | ctypes.c_longlong | ctypes.c_float]:
        """Return the arguments in order as C values, whose addresses are what cuLaunchKernel takes."""
        pointers = [ctypes.c_void_p(addresses[name]) for name in self.pointers]
        return [*pointers, *(C_TYPES[scalar.c_type](scalar.value) for scalar in self.scalars)]  # type: ignore[arg-type]


def ring_write(dtype: str, batch: int, heads: int, capacity: int, rows: int, head_dim: int) -> Launch:
    """Write `rows [B,G,N,D]` into `updated [B,G,R,D]`, which is the ring itself: nothing else of it is read or written."""
    _, element_bytes = _element(dtype, head_dim)
    if not 1 <= rows <= capacity:
        raise ValueError(f"{rows} rows do not fit a ring of {capacity} slots")
    vectors = head_dim * element_bytes // _VECTOR_BYTES
    return Launch(
        source="ring_write.cuh",
        kernel="dspark::ring_write",
        grid=(math.ceil(rows * vectors / _THREADS), batch * heads, 1),
        block=(_THREADS, 1, 1),
        shared_bytes=0,
        pointers=("updated", "rows", "start"),
        scalars=(
            Scalar("heads", "int", heads),
            Scalar("capacity", "int", capacity),
            Scalar("count", "int", rows),
            Scalar("vectors", "int", vectors),
        ),
    )


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one block attention, checked: Hq `heads`, G `kv_heads`, T `block`, R `capacity`. Raises ValueError."""

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    block: int
    capacity: int
    head_dim: int
    window: int

    def __post_init__(self) -> None:
        _element(self.dtype, self.head_dim)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads are no multiple of {self.kv_heads} key/value heads")


def block_attention(shape: AttentionShape, scale: float, multiprocessors: int) -> tuple[Launch, ...]:
    """Attend the block: one launch, or two where the keys are split to fill the device."""
    element, _ = _element(shape.dtype, shape.head_dim)
    plan = _Plan.of(shape, multiprocessors)
    inputs = ("query", "ring_key", "ring_value", "block_key", "block_value", "total", "first")
    keys = (Scalar("block", "int", shape.block), Scalar("capacity", "int", shape.capacity), Scalar("splits", "int", plan.splits))
    window = Scalar("window", "long long", shape.window)
    attend = Launch(
        source="block_attention.cuh",
        kernel=f"dspark::block_attention<{element}, {shape.head_dim}, {plan.tile_rows}>",
        grid=(plan.splits, shape.kv_heads * plan.row_tiles, shape.batch),
        block=(_THREADS, 1, 1),
        shared_bytes=plan.shared_bytes,
        pointers=(*inputs, "attended", "workspace"),
        scalars=(
            Scalar("kv_heads", "int", shape.kv_heads),
            Scalar("query_rows", "int", plan.query_rows),
            *keys,
            window,
            Scalar("scale", "float", scale * math.log2(math.e)),
        ),
    )
    if plan.splits == 1:
        return (attend,)
    request_rows = shape.heads * shape.block
    merge = Launch(
        source="block_attention.cuh",
        kernel=f"dspark::merge_splits<{element}, {shape.head_dim}>",
        grid=(math.ceil(shape.batch * request_rows / (_THREADS // _WARP)), 1, 1),
        block=(_THREADS, 1, 1),
        shared_bytes=0,
        pointers=("workspace", "total", "first", "attended"),
        scalars=(
            Scalar("all_rows", "int", shape.batch * request_rows),
            Scalar("request_rows", "int", request_rows),
            *keys,
            window,
        ),
    )
    return attend, merge


def block_attention_workspace(shape: AttentionShape, multiprocessors: int) -> int:
    """Return the bytes of workspace that the same call of `block_attention` needs: none where the keys are not split."""
    splits = _Plan.of(shape, multiprocessors).splits
    return 0 if splits == 1 else shape.batch * shape.heads * shape.block * splits * (shape.head_dim + 2) * _FLOAT_BYTES


@dataclass(frozen=True)
class _Plan:
    """How one attention is divided: query rows into tiles, keys into pieces."""

    query_rows: int
    tile_rows: int
    row_tiles: int
    splits: int
    shared_bytes: int

    @staticmethod
    def of(shape: AttentionShape, multiprocessors: int) -> _Plan:
        _, element_bytes = _element(shape.dtype, shape.head_dim)
        row_bytes = shape.head_dim * element_bytes
        tile_keys = 16 if row_bytes > 512 else 32
        query_rows = shape.heads // shape.kv_heads * shape.block
        # A thread keeps tile_rows / 16 x head_dim / 8 sums in registers: 64 at most.
        row_tiles = math.ceil(query_rows / (32 if shape.head_dim > 128 else 64))
        tile_rows = math.ceil(query_rows / row_tiles / _ROW_STEP) * _ROW_STEP
        # Two blocks for each multiprocessor: one waits for memory while the other computes. A piece is at least one tile of keys.
        wanted = 2 * multiprocessors // (shape.batch * shape.kv_heads * row_tiles)
        splits = max(1, min(wanted, math.ceil((min(shape.capacity, shape.window) + shape.block) / tile_keys)))
        tiles_bytes = (tile_rows + 2 * tile_keys) * (row_bytes + _VECTOR_BYTES)
        weights_bytes = tile_rows * (tile_keys + 8) * _FLOAT_BYTES
        return _Plan(query_rows, tile_rows, row_tiles, splits, tiles_bytes + weights_bytes)


def _element(dtype: str, head_dim: int) -> tuple[str, int]:
    if dtype not in ELEMENTS:
        raise ValueError(f"dtype {dtype!r} has no kernels: expected one of {', '.join(ELEMENTS)}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head dimension {head_dim} has no kernels: expected one of {', '.join(map(str, HEAD_DIMS))}")
    return ELEMENTS[dtype]
