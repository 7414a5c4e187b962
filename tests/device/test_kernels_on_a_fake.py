"""The sections about kernels, run without a card: emulated kernels behind a libcuda of our own, launched by the product's launcher.

Everything but the card is the real thing: the operators' calls, `dspark.plugins.launch`, the ctypes layer, the addresses of 64 bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulator
import numpy as np
import pytest
import torch
from device import accuracy, bandwidth, capture, driver, operators, reference
from device.accuracy import Case
from kernel_cases import DTYPES, Attention, Write

from dspark.plugins import compile as compiler
from dspark.plugins import kernels, launch
from dspark.plugins import reference as numpy_reference
from dspark.plugins.contract import RING_WRITE
from dspark.plugins.rules import PluginError

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="the emulation of the kernels is compiled with g++")

FAKE = Path(__file__).with_name("fake_cuda.cpp")
ONE, SEVERAL = 1, 64


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    place = tmp_path_factory.mktemp("fake")
    emulator._compile(["-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", str(FAKE), "-ldl", "-o", str(place / "libcuda.so")])
    return ctypes.CDLL(str(place / "libcuda.so"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """Libraries of emulated kernels by what they hold."""
    return {"place": tmp_path_factory.mktemp("emulated")}


@pytest.fixture
def card(fake: ctypes.CDLL, built: dict[Any, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """A card whose modules are emulated kernels, compiled when they are loaded."""
    names = ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.bindings.runtime")
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    driver.substitute(driver.Driver(fake))
    fake.fake_set(0, ONE, 0)

    def compiled(launches: list[kernels.Launch], capability: tuple[int, int]) -> compiler.Binary:
        assert capability == (9, 0)
        key = kernels.SOURCES, *(one.kernel for one in launches)
        if key not in built:
            place = built["place"] / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
            built[key] = emulator.build(place, launches, sources=kernels.SOURCES)
        return compiler.Binary(str(built[key]).encode(), {one.kernel: emulator._entry(one) for one in launches}, "")

    monkeypatch.setattr(compiler, "compile_kernels", compiled)
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setattr(launch, "_allowed", {})
    yield fake
    for name in names:
        sys.modules.pop(name, None)


CASES = [
    Case("fp32", 64, 4, 2, batch=4, capacity=48, window=40, total=(0, 20, 48, 149), first=(0, 0, 3, 130)),
    Case("fp16", 80, 5, 1, batch=3, capacity=48, window=40, total=(48, 2**33 + 3, 1), first=(0,)),
    Case("bf16", 64, 8, 2, batch=2, capacity=33, window=32, total=(1000, 31), first=(0, 3)),
]


@pytest.mark.parametrize("count", [ONE, SEVERAL])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.dtype)
def test_emulated_kernels_are_within_the_limits(card: ctypes.CDLL, case: Case, count: int) -> None:
    """The limits are no wider than needed: the emulation uses a third of the slack, and nearly all of a 16-bit rounding."""
    card.fake_set(0, count, 0)
    error, share = accuracy.errors(case, "cpu")
    assert share < 1
    assert error < accuracy.SLACK / 3 if case.dtype == "fp32" else share > 0.5


@pytest.mark.parametrize("count", [ONE, SEVERAL])
@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        ("block_attention.cuh", "if (slot >= capacity) slot -= capacity;", "if (slot > capacity) slot -= capacity;"),
        ("block_attention.cuh", "oldest = total - window;", "oldest = total - window - 1;"),
        ("ring_write.cuh", "if (slot >= capacity) slot -= capacity;", "if (slot >= capacity) slot = 0;"),
    ],
)
def test_a_wrong_kernel_is_found(
    card: ctypes.CDLL,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    count: int,
    source: str,
    old: str,
    new: str,
) -> None:
    card.fake_set(0, count, 0)
    for path in kernels.SOURCES.glob("*.cuh"):
        (tmp_path / path.name).write_text(path.read_text())
    text = (tmp_path / source).read_text()
    assert text.count(old) == 1
    (tmp_path / source).write_text(text.replace(old, new))
    monkeypatch.setattr(kernels, "SOURCES", tmp_path)
    case = Case("fp16", 64, 2, 2, batch=2, capacity=48, window=40, total=(149, 20), first=(0,))
    faults = accuracy.check_writes("fp16", 64, "cpu") if source == "ring_write.cuh" else accuracy.compare([case], "cpu")
    assert faults
    assert source == "ring_write.cuh" or "fp16" in capsys.readouterr().out


def test_ring_writes_and_neighbours(card: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    assert accuracy.check_writes("bf16", 64, "cpu") == []
    whole = Case
    monkeypatch.setattr(accuracy, "Case", lambda dtype, *_, **given: whole(dtype, 64, 2, 1, 2, 7, 48, 40, **given))
    card.fake_set(0, SEVERAL, 0)
    assert accuracy.check_neighbours("fp16", "cpu") == []


@pytest.mark.parametrize("count", [ONE, SEVERAL])
def test_replay_against_launches(card: ctypes.CDLL, count: int) -> None:
    """Replaying is launching again here; a replay that does not see changed inputs, or runs nothing, is found."""
    card.fake_set(0, count, 0)
    assert capture.compare("fp16", "cpu", lambda work: work) == []

    def idle(_: Any) -> Any:
        return lambda: None

    assert "fp16, ring of 48: attended differs in round 0" in capture.compare("fp16", "cpu", idle)
    assert "fp16: nothing was computed" in capture.compare("fp16", "cpu", idle)


def test_addresses_streams_and_shared_memory_arrive(card: ctypes.CDLL) -> None:
    case = Case("fp32", 128, 16, 2, batch=1, capacity=48, window=40, total=(20,), first=(0,))
    tensors = case.tensors("cpu")
    call = operators.block_attention(tensors, 0.1, 40)
    (one,) = call.launches
    assert ctypes.c_long.in_dll(card, "allowed_shared").value == one.shared_bytes > 48 << 10
    stream, before = 2**47 + 5, ctypes.c_long.in_dll(card, "launches").value
    launch.launch(call._prepared, call._addresses, stream)
    assert ctypes.c_uint64.in_dll(card, "last_stream").value == stream
    assert ctypes.c_long.in_dll(card, "launches").value == before + 1
    assert torch.isfinite(tensors["attended"]).all()


def test_errors_of_the_driver_have_their_names(card: ctypes.CDLL) -> None:
    ring = torch.zeros(1, 1, 16, 64)
    call = operators.ring_write(ring, torch.ones(1, 1, 2, 64), torch.zeros(1, dtype=torch.int64))
    card.fake_set(1, ONE, 0)
    with pytest.raises(PluginError, match="dspark::ring_write: CUDA says CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        call()
    card.fake_set(0, ONE, -1)
    assert launch.device_capability() is None
    with pytest.raises(PluginError, match="needs a CUDA device"):
        launch.prepare(RING_WRITE, "fp32", {"B": 1, "G": 1, "R": 16, "N": 2, "D": 64}, {})


def test_an_installed_cuda_bindings_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.importlib.util, "find_spec", lambda _: True)
    driver.install("no such library")


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_reference_against_the_other_one(dtype: str) -> None:
    """torch in float64, by masks, against numpy, row by row."""
    for case in (
        Attention(dtype),
        Attention(dtype, window=9, firsts=(0, 17, 45, 146)),
        Attention(dtype, capacity=33, totals=(2**33 + 3, 33)),
    ):
        arrays = case.arrays()
        inputs = {name: arrays[name] for name in ("query", "ring_key", "ring_value", "block_key", "block_value", "total", "first")}
        tensors = {name: torch.from_numpy(a.astype(np.int64 if a.dtype == np.int64 else np.float64)) for name, a in inputs.items()}
        expected = numpy_reference.block_attention(*inputs.values(), scale=0.125, window=case.window)
        np.testing.assert_allclose(reference.block_attention(tensors, 0.125, case.window).numpy(), expected, rtol=1e-12, atol=1e-14)
    write = Write("float32").arrays()
    written = reference.ring_write(*(torch.from_numpy(write[name]) for name in ("updated", "rows", "start")))
    np.testing.assert_array_equal(written.numpy(), numpy_reference.ring_write(write["updated"], write["rows"], write["start"]))


def test_cases_cover_what_they_claim() -> None:
    cases = list(accuracy.cases())
    for dtype, (_, size) in zip(operators.DTYPES, kernels.ELEMENTS.values(), strict=True):
        names = set()
        for case in (case for case in cases if case.dtype == dtype):
            name = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[dtype]
            sizes = (case.batch, case.heads, case.kv_heads, case.block, case.capacity, case.head_dim, case.window)
            for multiprocessors in (46, 132, 170):
                launches = kernels.block_attention(kernels.AttentionShape(name, *sizes), 1.0, multiprocessors)
                names |= {(one.kernel.partition("<")[0], one.kernel.rpartition(",")[2], case.head_dim) for one in launches}
        tiles = {int(rows[:-1]) for kernel, rows, _ in names if kernel.endswith("block_attention")}
        assert tiles == {16, 32, 48, 64}
        assert {dim for _, _, dim in names} == set(kernels.HEAD_DIMS)
        assert operators.DTYPES[dtype].itemsize == size
    for multiprocessors in (46, 132, 170):
        unsplit = [
            len(kernels.block_attention(kernels.AttentionShape("float16", b, 32, 8, 7, 2064, 128, 2048), 1.0, multiprocessors))
            for b in (1, 24)
        ]
        assert unsplit == [2, 1]


def test_bytes_are_those_of_the_tensors() -> None:
    """One request of Qwen3-8B's drafter, as the design note counts it."""
    assert bandwidth.attention_bytes(1, 7, 2) / 1e6 == pytest.approx(8.4 + 0.1, abs=0.05)
    assert bandwidth.write_bytes(1, 2) == 32 << 10
    assert bandwidth.line({"kernel": "attend", "dtype": "bf16", "batch": 1, "T": 7}, 8.5e-6, 8_500_000, 4e12).endswith("1000   25.0%")
