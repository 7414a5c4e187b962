"""ONNX Runtime's CUDA provider: host logic on a fake device, where sessions of the CPU provider stand in; parity on a real one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda

from dspark.runtime import LLM, SamplingParams, cuda_provider
from dspark.runtime.backend import open_engine
from dspark.runtime.bundle import load_bundle
from dspark.runtime.cuda_provider import CudaProviderEngine
from dspark.runtime.errors import EngineError
from dspark.runtime.graphs import ACCEPT, CONTEXT

PROMPTS = [[5, 6, 7, 8], list(range(40, 140)), [9] * 33]


class InOrder:
    """A session of the CPU provider that runs behind what is enqueued on the fake device, as one of the CUDA provider would."""

    def __init__(self, session: Any, cuda: FakeCuda) -> None:
        self._session, self._cuda = session, cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        self._cuda.run_all()
        self._session.run_with_iobinding(binding)


class OnTheHost(CudaProviderEngine):
    provider, device_type = "CPUExecutionProvider", "cpu"

    def _providers(self) -> list[Any]:
        (_, options) = super()._providers()[0]
        assert options == {"device_id": 0, "user_compute_stream": "77", "use_tf32": "0"}
        return [self.provider]

    def _load(self, graph: str) -> Any:
        return InOrder(super()._load(graph), self._cuda)  # type: ignore[arg-type]


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(cuda_provider, "Cuda", lambda: cuda)
    monkeypatch.setattr(cuda_provider, "CudaProviderEngine", OnTheHost)
    return cuda


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_outputs_are_those_of_the_cpu(small_bundle: Path, on_the_host: FakeCuda, temperature: float) -> None:
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=1, ignore_eos=True)
    expected = LLM(small_bundle, threads=1).generate(PROMPTS, params)
    llm = LLM(small_bundle, backend="onnxruntime-cuda")
    on_the_host.calls.clear()
    actual = llm.generate(PROMPTS, params)
    assert [o.token_ids for o in actual] == [o.token_ids for o in expected]
    rounds = max(len(o.stats.accepted_per_round) for o in actual)
    assert on_the_host.calls["copy_out"] < 3 * rounds, "no tensor comes back but tokens and counts"


def test_a_fall_back_to_the_cpu_is_an_error(small_bundle: Path) -> None:
    """The installed ONNX Runtime may know the provider or not: without a device it never gets it."""
    engine = CudaProviderEngine(load_bundle(small_bundle), log_severity=4, cuda=FakeCuda())  # type: ignore[arg-type]
    remedy = 'pip uninstall -y onnxruntime onnxruntime-gpu && pip install "dspark\\[onnxruntime-gpu\\]"'
    with pytest.raises(EngineError, match=f"(fell back to CPUExecutionProvider, expected CUDAExecutionProvider.*: {remedy}|cannot load)"):
        engine.load([ACCEPT])


def test_what_is_bound(small_bundle: Path, on_the_host: FakeCuda) -> None:
    """Every input and output by name, device, dtype, shape and address; bfloat16, which numpy lacks, by its number."""
    engine = OnTheHost(load_bundle(small_bundle))
    made = {"taps": engine._device.tensor((1, 2, 192), "bf16"), "start": engine.allocate((1,), "int64")}
    rings = {spec.name: engine._device.tensor((1, 2, 48, 16), "fp16") for spec in engine.signatures[CONTEXT].inputs[2:]}
    calls: dict[str, tuple[Any, ...]] = {}
    recorder = SimpleNamespace(bind_input=lambda *a: calls.update({a[0]: a[1:]}), bind_output=lambda *a: calls.update({a[0]: a[1:]}))
    engine.bound(recorder, engine.signatures[CONTEXT], made | rings)
    assert calls["taps"] == ("cpu", 0, 16, [1, 2, 192], made["taps"].address)
    assert calls["start"] == ("cpu", 0, np.int64, [1], made["start"].address)  # type: ignore[attr-defined]
    for name, ring in rings.items():
        assert calls[name] == calls[f"{name}.updated"] == ("cpu", 0, np.float16, [1, 2, 48, 16], ring.address)


@pytest.mark.gpu
@pytest.mark.parametrize("speculative", [True, False])
def test_parity_on_a_device(pair_bundle: Path, speculative: bool) -> None:
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    expected = LLM(pair_bundle).generate(PROMPTS, params, speculative=speculative)
    actual = LLM(pair_bundle, backend="onnxruntime-cuda").generate(PROMPTS, params, speculative=speculative)
    assert [o.token_ids for o in actual] == [o.token_ids for o in expected]


@pytest.mark.gpu
def test_graphs_on_a_device(pair_bundle: Path) -> None:
    assert open_engine(load_bundle(pair_bundle), "onnxruntime-cuda").available_memory()
