"""The kernels compiled by NVRTC for every architecture we name: what each uses, and the cache. No GPU is needed, and none is used."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from dspark.plugins import compile as compiler
from dspark.plugins import kernels
from dspark.plugins.kernels import Launch

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]

REGISTERS = {
    "block_attention<64, 16>": 88,
    "block_attention<64, 32>": 104,
    "block_attention<64, 48>": 128,
    "block_attention<64, 64>": 136,
    "block_attention<80, 16>": 104,
    "block_attention<80, 32>": 112,
    "block_attention<80, 48>": 136,
    "block_attention<80, 64>": 160,
    "block_attention<96, 16>": 112,
    "block_attention<96, 32>": 128,
    "block_attention<96, 48>": 144,
    "block_attention<96, 64>": 168,
    "block_attention<128, 16>": 120,
    "block_attention<128, 32>": 128,
    "block_attention<128, 48>": 160,
    "block_attention<128, 64>": 168,
    "block_attention<256, 16>": 144,
    "block_attention<256, 32>": 168,
    "merge_splits<64>": 40,
    "merge_splits<80>": 40,
    "merge_splits<96>": 40,
    "merge_splits<128>": 40,
    "merge_splits<256>": 40,
    "ring_write": 24,
}
"""Most registers of a thread by kernel without its dtype: what NVRTC 13.0.88 needs for the worst of dtypes and architectures, in eights.

168 is a third of a multiprocessor's 65536 for each block of 128 threads: three blocks of any kernel fit.
"""
SHARED_BYTES = 99 * 1024
"""What one block may use on sm_86, sm_89 and sm_120, the least of these architectures."""
SPILLS: dict[str, str] = {}
"""Kernels that may spill registers, by name, with the reason: none does."""


def nvrtc_installed() -> bool:
    try:
        return bool(importlib.metadata.version("nvidia-cuda-nvrtc"))
    except importlib.metadata.PackageNotFoundError:
        return False


needs_nvrtc = pytest.mark.skipif(not nvrtc_installed(), reason="nvidia-cuda-nvrtc is not installed (the extra cuda)")


def attention(dtype: str, head_dim: int, group: int) -> tuple[Launch, ...]:
    """Seven block rows over a ring of 2064 slots, 8 key/value heads, on 132 multiprocessors."""
    return kernels.block_attention(kernels.AttentionShape(dtype, 1, 8 * group, 8, 7, 2064, head_dim, 2048), head_dim**-0.5, 132)


@dataclass(frozen=True)
class Usage:
    """What the assembler says of one kernel."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int

    @staticmethod
    def of(binary: compiler.Binary, kernel: str) -> Usage:
        part = binary.log.partition(f"Function properties for {binary.symbols[kernel]}\n")[2].partition("Compile time")[0]
        spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers", part)
        assert spilled and used, binary.log
        stack, stores, loads = map(int, spilled.groups())
        shared = re.search(r"(\d+) bytes smem", part)
        return Usage(int(used[1]), stack, stores + loads, int(shared[1]) if shared else 0)


def check(launches: list[Launch], capability: tuple[int, int], cache: Path) -> None:
    binary = compiler.compile_kernels(launches, capability, cache)
    assert binary.cubin.startswith(b"\x7fELF")
    assert binary.symbols.keys() == {launch.kernel for launch in launches}
    for launch in launches:
        assert binary.symbols[launch.kernel].encode() in binary.cubin
        usage = Usage.of(binary, launch.kernel)
        assert usage.registers <= REGISTERS[re.sub(r"<[^,]*, ", "<", launch.kernel.removeprefix("dspark::"))], launch.kernel
        assert usage.shared_bytes + launch.shared_bytes <= SHARED_BYTES, launch.kernel
        assert usage.stack_bytes == usage.spill_bytes == 0 or launch.kernel in SPILLS, launch.kernel


@needs_nvrtc
@pytest.mark.parametrize("dtype", list(kernels.ELEMENTS))
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda capability: f"sm_{capability[0]}{capability[1]}")
def test_kernels_compile_within_their_limits(tmp_path: Path, capability: tuple[int, int], dtype: str) -> None:
    """The tallest tiles, which need most: 64 query rows, 32 for the longest rows."""
    write = kernels.ring_write(dtype, 1, 8, 2064, 8, 128)
    check([write, *(launch for dim in kernels.HEAD_DIMS for launch in attention(dtype, dim, 8))], capability, tmp_path)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(kernels.ELEMENTS))
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda capability: f"sm_{capability[0]}{capability[1]}")
def test_lower_tiles_compile_within_their_limits(tmp_path: Path, capability: tuple[int, int], dtype: str) -> None:
    """16, 32 and 48 query rows."""
    launches = [launch for dim in kernels.HEAD_DIMS for group in (2, 4, 6) for launch in attention(dtype, dim, group)]
    check(launches, capability, tmp_path)


@needs_nvrtc
def test_the_cache_is_keyed_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = [kernels.ring_write("float16", 1, 8, 2064, 8, 128)]
    calls = []
    original = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *arguments: calls.append(arguments) or original(*arguments))
    first = compiler.compile_kernels(launches, (8, 9), tmp_path)
    assert compiler.compile_kernels(launches, (8, 9), tmp_path) == first
    # Sizes are arguments of the kernel, not part of it.
    assert compiler.compile_kernels([kernels.ring_write("float32", 4, 8, 64, 3, 64)], (8, 9), tmp_path) == first
    assert len(calls) == 1
    assert compiler.compile_kernels(launches, (9, 0), tmp_path).cubin != first.cubin
    assert len(calls) == 2

    sources = tmp_path / "sources"
    sources.mkdir()
    for path in kernels.SOURCES.glob("*.cuh"):
        (sources / path.name).write_text(path.read_text().replace("+ row;", "+ row + 1;"))
    monkeypatch.setattr(compiler, "SOURCES", sources)
    assert compiler.compile_kernels(launches, (8, 9), tmp_path).cubin != first.cubin
    assert len(calls) == 3
    assert len(list(tmp_path.glob("*.json"))) == 3


@needs_nvrtc
@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"cubin": "?", "symbols": {}, "log": ""}', '{"cubin": "", "symbols": 3, "log": ""}']
)
def test_a_damaged_cache_entry_is_written_anew(tmp_path: Path, content: str) -> None:
    launches = [kernels.ring_write("float16", 1, 8, 2064, 8, 128)]
    binary = compiler.compile_kernels(launches, (8, 9), tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_text(content)
    assert compiler.compile_kernels(launches, (8, 9), tmp_path) == binary
    assert json.loads(entry.read_text())["symbols"] == binary.symbols
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


@needs_nvrtc
def test_several_threads_compile_the_same(tmp_path: Path) -> None:
    launches = [kernels.ring_write("float16", 1, 8, 2064, 8, 128)]
    with ThreadPoolExecutor(4) as pool:
        binaries = list(pool.map(lambda _: compiler.compile_kernels(launches, (8, 9), tmp_path), range(4)))
    assert binaries == binaries[:1] * 4
    assert len(list(tmp_path.iterdir())) == 1


@needs_nvrtc
def test_what_nvrtc_refuses_is_shown(tmp_path: Path) -> None:
    launches = [kernels.ring_write("float16", 1, 8, 2064, 8, 128)]
    with pytest.raises(compiler.CompileError, match=r"sm_11 .*\n.*gpu-architecture"):
        compiler.compile_kernels(launches, (1, 1), tmp_path)
    with pytest.raises(compiler.CompileError, match="no_such_kernel"):
        compiler.compile_kernels([Launch("ring_write.cuh", "no_such_kernel", (1, 1, 1), (1, 1, 1), 0, (), ())], (8, 9), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_nvrtc_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "files", missing)
    monkeypatch.setattr(ctypes.util, "find_library", {}.get)
    for function in (compiler._library, compiler._version):
        function.cache_clear()
    with pytest.raises(compiler.CompilerMissingError, match=r"dspark\[cuda\]"):
        compiler.compile_kernels([kernels.ring_write("float16", 1, 8, 2064, 8, 128)], (8, 9), tmp_path)


@needs_nvrtc
@pytest.mark.parametrize("place", ["a torch for CUDA 12", "a toolkit"])
def test_other_places_of_nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    files = importlib.metadata.files("nvidia-cuda-nvrtc")
    library = next(str(file.locate()) for file in files or [] if compiler._LIBRARY.fullmatch(file.name))

    def found(package: str) -> object:
        if place == "a torch for CUDA 12" and package == "nvidia-cuda-nvrtc-cu12":
            return files
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "files", found)
    monkeypatch.setattr(ctypes.util, "find_library", {"nvrtc": library}.get if place == "a toolkit" else {}.get)
    compiler._library.cache_clear()
    assert compiler.compile_kernels([kernels.ring_write("float16", 1, 8, 2064, 8, 128)], (8, 9), tmp_path).cubin


def test_the_cache_is_where_the_platform_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.user_cache_directory() == tmp_path / "dspark" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler.user_cache_directory() == tmp_path / ".cache" / "dspark" / "kernels"
