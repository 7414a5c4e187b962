"""The CUDA kernels, run on the CPU from their own source, against the numpy reference in float64."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import emulator
import numpy as np
import pytest
from kernel_cases import DTYPES, Attention, Write

from dspark.plugins import kernels

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="the emulation of the kernels is compiled with g++")

ONE, SEVERAL = 1, 64
"""Multiprocessors with which these shapes are attended in one piece and in several."""

EVERY = [Attention(dtype, head_dim=dim, multiprocessors=count) for dtype in DTYPES for dim in kernels.HEAD_DIMS for count in (ONE, SEVERAL)]

GROUPS = [
    Attention(dtype, batch=2, heads=2 * group, multiprocessors=count, totals=(20, 149), firsts=(0, 115))
    for group, dtype in enumerate(["float32", "float16", "bfloat16", "float16"] * 2, start=1)
    for count in (ONE, SEVERAL)
]
"""1 to 8 query heads a key/value head: 7 to 56 rows share each tile."""

SHAPES = [
    Attention(batch=1, heads=16, kv_heads=1, block=16, totals=(90,), firsts=(0,), multiprocessors=SEVERAL),
    Attention("float16", batch=1, heads=5, kv_heads=1, block=8, head_dim=256, totals=(90,), firsts=(0,)),
    Attention(batch=2, block=1, capacity=5, window=3, totals=(4, 2**33 + 3), firsts=(0, 0)),
    Attention(batch=2, block=16, capacity=64, window=1 << 62, totals=(63, 200), firsts=(60, 0), multiprocessors=SEVERAL),
    Attention("float16", batch=7, capacity=33, window=32, totals=(0, 1, 31, 32, 33, 34, 1000), firsts=(0,), multiprocessors=SEVERAL),
]
"""Several row tiles, with one partly filled; small and odd rings; positions past 2**32; no window; every state of a ring."""

WINDOWS = [
    Attention(window=window, firsts=firsts) for window in (1, 9, 48) for firsts in [(0,), (0, 17, 45, 146), (0, 20, 48, 149), (500,)]
]
"""Holes at the front: none, some, all of the ring, and a first position that lies ahead."""

WRITES = [Write(dtype, head_dim=dim, rows=rows) for dtype in DTYPES for dim in kernels.HEAD_DIMS for rows in (1, 5, 16)]
WRITES += [Write(batch=2, capacity=1, rows=1), Write(capacity=7, rows=7, starts=(6, 0, 3)), Write(capacity=40, rows=40, head_dim=256)]

CASES = EVERY + GROUPS + SHAPES + WINDOWS

CONVERSIONS = """
extern "C" float half_to_float(unsigned short bits) { return dspark::float_from_half(bits); }
extern "C" unsigned short float_to_half(float value) { return dspark::half_from_float(value); }
extern "C" unsigned short float_to_bfloat16(float value) { return dspark::bfloat16_from_float(value); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    launches = [launch for case in [*CASES, *WRITES] for launch in case.launches()]
    return emulator.build(tmp_path_factory.mktemp("emulated"), launches, extra=CONVERSIONS, parts=4)


def name(case: object) -> str:
    changed = [(f.name, getattr(case, f.name)) for f in dataclasses.fields(case) if getattr(case, f.name) != f.default]
    return " ".join(f"{key}={value}" for key, value in changed)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_block_attention(library: Path, case: Attention) -> None:
    launches, arrays = case.launches(), case.arrays()
    assert len(launches) == (1 if case.multiprocessors == ONE else 2)
    emulator.run(library, launches, arrays)
    case.check(arrays)


@pytest.mark.parametrize("case", WRITES, ids=name)
def test_ring_write(library: Path, case: Write) -> None:
    arrays = case.arrays()
    emulator.run(library, case.launches(), arrays)
    case.check(arrays)


@pytest.mark.parametrize("count", [ONE, SEVERAL])
def test_not_a_number_in_a_visible_slot_shows(library: Path, count: int) -> None:
    """What makes the NaN in the hidden slots of every case a test."""
    case = Attention(multiprocessors=count)
    for name in ("ring_key", "ring_value"):
        arrays = case.arrays()
        arrays[name][3, 1, 148 % case.capacity, 5] = np.nan
        emulator.run(library, case.launches(), arrays)
        touched = np.isnan(arrays["attended"])
        assert touched[3, 2:, :, 5].all()
        assert not touched[:3].any() and not touched[3, :2].any()


def test_results_do_not_depend_on_the_neighbours(library: Path) -> None:
    """Bit for bit: the pieces of a request follow from its own numbers."""
    case = Attention("float16", multiprocessors=SEVERAL)
    together, alone = case.arrays(), case.arrays()
    emulator.run(library, case.launches(), together)
    alone["total"][1:], alone["first"][1:] = 3, 0
    emulator.run(library, case.launches(), alone)
    np.testing.assert_array_equal(together["attended"][0], alone["attended"][0])


def test_emulated_conversions(library: Path) -> None:
    """Every float16, and floats whose roundings cover ties, subnormal and infinite results."""
    loaded = ctypes.CDLL(str(library))
    loaded.half_to_float.restype = ctypes.c_float
    loaded.half_to_float.argtypes = [ctypes.c_ushort]
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    converted = np.array([loaded.half_to_float(int(bits)) for bits in halves.view(np.uint16)], np.float32)
    np.testing.assert_array_equal(converted, halves.astype(np.float32))
    finite = halves[np.isfinite(halves)]
    ties = (finite.astype(np.float32) + np.nextafter(finite, np.float16(65504)).astype(np.float32)) / 2
    values = np.concatenate([finite, ties, np.nextafter(ties, np.float32(0)), [65519.9, 65520, 1e30, -1e-9, np.inf]]).astype(np.float32)
    for function, dtype in [(loaded.float_to_half, DTYPES["float16"]), (loaded.float_to_bfloat16, DTYPES["bfloat16"])]:
        function.restype, function.argtypes = ctypes.c_ushort, [ctypes.c_float]
        ours = np.array([function(float(value)) for value in values], np.uint16)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(ours, values.astype(dtype).view(np.uint16))


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 128), ("bfloat16", 128), ("float32", 64), ("float16", 256)])
@pytest.mark.parametrize("multiprocessors", [16, 46, 84, 108, 132, 170])
def test_one_request_fills_a_device(dtype: str, head_dim: int, multiprocessors: int) -> None:
    """Qwen3-8B's drafter at W = 2048: as many blocks as multiprocessors, and keys for each of them."""
    shape = kernels.AttentionShape(dtype, 1, 32, 8, 7, 2064, head_dim, 2048)
    attend, merge = kernels.block_attention(shape, head_dim**-0.5, multiprocessors)
    blocks = int(np.prod(attend.grid))
    assert multiprocessors <= blocks <= 2 * multiprocessors
    assert blocks // 8 * 32 <= 2048 + 7 + 31
    assert merge.grid[0] * 4 >= 32 * 7
    assert kernels.block_attention_workspace(shape, multiprocessors) == 32 * 7 * attend.grid[0] * (head_dim + 2) * 4


def test_a_full_device_is_not_split() -> None:
    shape = kernels.AttentionShape("float16", 32, 32, 8, 7, 2064, 128, 2048)
    assert len(kernels.block_attention(shape, 1.0, 108)) == 1
    assert kernels.block_attention_workspace(shape, 108) == 0


def test_what_has_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head dimension 72 .* 64, 80, 96, 128, 256"):
        kernels.ring_write("float16", 1, 1, 16, 1, 72)
    with pytest.raises(ValueError, match=r"'int8' .* float32, float16, bfloat16"):
        kernels.AttentionShape("int8", 1, 2, 2, 7, 16, 64, 16)
    with pytest.raises(ValueError, match="6 query heads are no multiple of 4"):
        kernels.AttentionShape("float16", 1, 6, 4, 7, 16, 64, 16)
    with pytest.raises(ValueError, match="17 rows do not fit a ring of 16"):
        kernels.ring_write("float16", 1, 1, 16, 17, 64)
