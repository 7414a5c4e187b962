"""The kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, and the proof that faults are found.

Each proof changes one place of the source and expects the run to fail: barriers that are gone are races, indices that are shifted give
other numbers or leave their buffers.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import emulator
import pytest
from emulator import ADDRESS, NONE, THREAD, Sanitizer
from kernel_cases import Attention, Write

from dspark.plugins.kernels import SOURCES

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="the emulation of the kernels is compiled with g++")

ATTENTION = Attention("float16", batch=2, kv_heads=1, heads=2, window=33, totals=(60, 2), firsts=(0, 1), multiprocessors=1)
"""Two key tiles for each of two requests; 14 of 16 query rows used; the ring wraps."""
SPLIT = Attention("float16", batch=1, kv_heads=1, heads=1, window=33, totals=(60,), firsts=(0,), multiprocessors=64)
WRITE = Write("float16", batch=2, starts=(3, 14))
CASES: tuple[Attention | Write, ...] = (ATTENTION, SPLIT, WRITE)


NOTE = "ASan doesn't fully support makecontext/swapcontext"
"""Said by AddressSanitizer once a process; the emulation tells it of every switch, which is what it means."""


def run(library: Path, sanitizer: Sanitizer, case: Attention | Write) -> str:
    """Run a case; return what the sanitizer reported, and raise AssertionError where the numbers differ."""
    arrays = case.arrays()
    result = emulator.run_sanitized(library, sanitizer, case.launches(), arrays)
    if result.returncode == 0:
        case.check(arrays)
    return "".join(line for line in result.stderr.splitlines(keepends=True) if NOTE not in line)


@pytest.mark.parametrize("sanitizer", [ADDRESS, THREAD], ids=["address", "thread"])
def test_sanitized(tmp_path: Path, sanitizer: Sanitizer) -> None:
    launches = [launch for case in CASES for launch in case.launches()]
    library = emulator.build(tmp_path, launches, sanitizer, parts=2)
    for case in CASES:
        assert run(library, sanitizer, case) == ""


def test_launches_ask_for_the_shared_memory_that_the_kernel_uses(tmp_path: Path) -> None:
    """The weights' last 32 bytes are padding; with 48 bytes less than asked for, a weight lies outside."""
    (launch,) = ATTENTION.launches()
    library = emulator.build(tmp_path, [launch], ADDRESS)
    short = dataclasses.replace(launch, shared_bytes=launch.shared_bytes - 48)
    result = emulator.run_sanitized(library, ADDRESS, [short], ATTENTION.arrays())
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr


def changed(directory: Path, source: str, old: str, new: str, occurrence: int = 0) -> Path:
    """Return a folder of the kernels' sources with one place changed."""
    for path in SOURCES.glob("*.cuh"):
        shutil.copy(path, directory)
    pieces = (SOURCES / source).read_text().split(old)
    assert len(pieces) > occurrence + 1, f"{source} has no such place: {old}"
    pieces[occurrence : occurrence + 2] = [pieces[occurrence] + new + pieces[occurrence + 1]]
    (directory / source).write_text(old.join(pieces))
    return directory


@pytest.mark.parametrize(
    ("barrier", "occurrence"), [("__syncthreads();", 0), ("__syncwarp();", 0), ("__syncthreads();", 1)], ids=["loaded", "weighted", "used"]
)
def test_a_missing_barrier_is_a_race(tmp_path: Path, barrier: str, occurrence: int) -> None:
    sources = changed(tmp_path, "block_attention.cuh", barrier, "", occurrence)
    library = emulator.build(tmp_path / "built", ATTENTION.launches(), THREAD, sources)
    assert "ThreadSanitizer: data race" in run(library, THREAD, ATTENTION)


def test_a_barrier_that_some_threads_miss_is_reported(tmp_path: Path) -> None:
    sources = changed(tmp_path, "block_attention.cuh", "__syncthreads();", "if (lane == 0) __syncthreads();")
    library = emulator.build(tmp_path / "built", ATTENTION.launches(), NONE, sources)
    with pytest.raises(RuntimeError, match="wait at a barrier that others never reach"):
        emulator.run(library, ATTENTION.launches(), ATTENTION.arrays())


def test_blocks_that_write_the_same_are_a_race(tmp_path: Path) -> None:
    sources = changed(tmp_path, "ring_write.cuh", "head = blockIdx.y", "head = blockIdx.z")
    library = emulator.build(tmp_path / "built", WRITE.launches(), THREAD, sources)
    assert "ThreadSanitizer: data race" in run(library, THREAD, WRITE)


@pytest.mark.parametrize(
    ("source", "old", "new", "case"),
    [
        ("block_attention.cuh", "slot -= capacity;", "slot -= capacity - 1;", ATTENTION),
        ("block_attention.cuh", "tile + lane + j * LANES < end", "tile + lane + j * LANES <= end", ATTENTION),
        ("block_attention.cuh", "block + index - range.visible", "block + index - range.visible + 1", ATTENTION),
        ("block_attention.cuh", "(partial + s) * HEAD_DIM", "(partial + s + 1) * HEAD_DIM", SPLIT),
        ("ring_write.cuh", "capacity) + row;", "capacity) + row + 1;", WRITE),
    ],
)
def test_a_shifted_index_gives_other_numbers(tmp_path: Path, source: str, old: str, new: str, case: Attention | Write) -> None:
    library = emulator.build(tmp_path / "built", case.launches(), NONE, changed(tmp_path, source, old, new))
    arrays = case.arrays()
    emulator.run(library, case.launches(), arrays)
    with pytest.raises(AssertionError):
        case.check(arrays)


@pytest.mark.parametrize(
    ("source", "old", "case"),
    [
        ("block_attention.cuh", "if (r < live_rows) words", ATTENTION),
        ("block_attention.cuh", "if (r >= live_rows) continue;", ATTENTION),
        ("ring_write.cuh", "if (slot >= capacity) slot -= capacity;", WRITE),
        ("ring_write.cuh", "if (index >= count * vectors) return;", WRITE),
    ],
)
def test_a_missing_bound_is_an_overflow(tmp_path: Path, source: str, old: str, case: Attention | Write) -> None:
    new = "words" if old.endswith("words") else ""
    library = emulator.build(tmp_path / "built", case.launches(), ADDRESS, changed(tmp_path, source, old, new))
    assert "AddressSanitizer: heap-buffer-overflow" in run(library, ADDRESS, case)
