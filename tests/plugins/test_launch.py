"""Launching, against a fake of cuda-bindings that records calls: what is compiled, loaded and launched, and when."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dspark.plugins import compile as compiler
from dspark.plugins import kernels, launch
from dspark.plugins.contract import BLOCK_ATTENTION, RING_WRITE
from dspark.plugins.rules import PluginError

SIZES = {"B": 2, "G": 4, "R": 2064, "D": 128, "N": 8, "Hq": 32, "T": 7}
ATTRIBUTES = {"scale": 0.125, "window": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128}


class Cuda:
    """The calls that the launcher makes; `fail` names one that reports an error."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail = ""
        success, failure = SimpleNamespace(name="CUDA_SUCCESS"), SimpleNamespace(name="CUDA_ERROR_ILLEGAL_ADDRESS")
        self.driver = ModuleType("cuda.bindings.driver")
        self.driver.CUresult = SimpleNamespace(CUDA_SUCCESS=success)
        self.driver.CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")
        for name in ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel"):

            def call(*arguments: Any, name: str = name) -> tuple[Any, ...]:
                self.calls.append((name, *arguments))
                status = failure if name == self.fail else success
                return (status, f"{name}({arguments[-1]!r:.40})") if name.startswith("cuModule") else (status,)

            setattr(self.driver, name, call)
        self.runtime = ModuleType("cuda.bindings.runtime")
        self.runtime.cudaError_t = SimpleNamespace(cudaSuccess=success)
        names = ("cudaDevAttrComputeCapabilityMajor", "cudaDevAttrComputeCapabilityMinor", "cudaDevAttrMultiProcessorCount")
        self.runtime.cudaDeviceAttr = SimpleNamespace(**dict(zip(names, (12, 0, 170), strict=True)))
        self.runtime.cudaGetDevice = lambda: (success, 0)
        self.runtime.cudaDeviceGetAttribute = lambda attribute, _device: (success, attribute)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    bindings = ModuleType("cuda.bindings")
    bindings.driver, bindings.runtime = fake.driver, fake.runtime
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("driver", "runtime"):
        monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", getattr(fake, name))

    def compiled(launches: Any, capability: tuple[int, int]) -> Any:
        fake.calls.append(("compile", capability, [one.kernel for one in launches]))
        return compiler.Binary(b"code", {one.kernel: f"_Z{one.kernel}" for one in launches}, "")

    monkeypatch.setattr(compiler, "compile_kernels", compiled)
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setattr(launch, "_allowed", {})
    return fake


def addresses(operator: Any) -> dict[str, int]:
    return {name: 4096 * i for i, name in enumerate([*operator.inputs, *operator.outputs, launch.WORKSPACE], 1)}


def test_a_launch_is_nothing_but_the_launch(cuda: Cuda) -> None:
    prepared = launch.prepare(RING_WRITE, "fp16", SIZES, {})
    assert cuda.named("compile") == [((12, 0), ["dspark::ring_write"])]
    cuda.calls.clear()
    places = addresses(RING_WRITE)
    launch.launch(prepared, places, 77)
    ((_, *sizes, stream, (values, kinds), _),) = cuda.named("cuLaunchKernel")
    assert len(cuda.calls) == 1
    expected = kernels.ring_write("float16", 2, 4, 2064, 8, 128)
    assert sizes == [*expected.grid, *expected.block, expected.shared_bytes]
    assert stream == 77
    assert values[:3] == tuple(places[name] for name in ("updated", "rows", "start"))
    assert len(values) == len(kinds) == 7


def test_kernels_are_compiled_once_and_allowed_their_shared_memory(cuda: Cuda) -> None:
    for _ in range(3):
        prepared = launch.prepare(BLOCK_ATTENTION, "fp32", SIZES, ATTRIBUTES)
    assert len(cuda.named("compile")) == len(cuda.named("cuModuleLoadData")) == 1
    needed = [one.launch.shared_bytes for one in prepared if one.launch.shared_bytes > 48 << 10]
    assert [call[2] for call in cuda.named("cuFuncSetAttribute")] == needed
    assert len(prepared) == 2  # the ring is long enough to be split
    launch.launch(prepared, addresses(BLOCK_ATTENTION), 1)
    assert len(cuda.named("cuLaunchKernel")) == 2


def test_workspace_holds_every_batch_and_device() -> None:
    """An engine built elsewhere for batches up to 8 has scratch memory for each of them, on any number of multiprocessors."""
    given = launch.workspace(BLOCK_ATTENTION, "bf16", SIZES | {"B": 8}, ATTRIBUTES)
    rows = (32, 4, 7, 2064, 128, 2048)
    for batch in range(1, 9):
        for multiprocessors in (20, 46, 132, 170, 192, launch.MOST_MULTIPROCESSORS):
            shape = kernels.AttentionShape("bfloat16", batch, *rows)
            assert kernels.block_attention_workspace(shape, multiprocessors) <= given
    most = launch.plan(BLOCK_ATTENTION, "bf16", SIZES, ATTRIBUTES, 10**6)
    assert most == launch.plan(BLOCK_ATTENTION, "bf16", SIZES, ATTRIBUTES, launch.MOST_MULTIPROCESSORS)
    assert launch.workspace(RING_WRITE, "bf16", SIZES, {}) == 0


@pytest.mark.parametrize("fail", ["cuModuleLoadData", "cuLaunchKernel"])
def test_errors_name_the_kernel(cuda: Cuda, fail: str) -> None:
    cuda.fail = fail
    with pytest.raises(PluginError, match="dspark::ring_write: CUDA says CUDA_ERROR_ILLEGAL_ADDRESS"):
        launch.launch(launch.prepare(RING_WRITE, "fp32", SIZES, {}), addresses(RING_WRITE), 0)


def test_no_device(cuda: Cuda) -> None:
    cuda.runtime.cudaGetDevice = lambda: (SimpleNamespace(name="cudaErrorNoDevice"), -1)
    assert launch.device_capability() is None
    with pytest.raises(PluginError, match=r'RingWrite needs a CUDA device and cuda-bindings.*pip install "dspark\[cuda\]"'):
        launch.prepare(RING_WRITE, "fp32", SIZES, {})
