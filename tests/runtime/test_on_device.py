"""Engines on a real device: outputs and state against ONNX Runtime on the CPU. Nothing here runs without a device."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import PAIR, Export

from dspark.plugins.launch import device_capability
from dspark.runtime import LLM, SamplingParams
from dspark.runtime.engines import FLAVOURS
from dspark.runtime.errors import EngineError
from dspark.runtime.flavour import load_module

PROMPTS = [[5, 6, 7, 8], list(range(40, 140)), [9] * 33]

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session", params=list(FLAVOURS))
def flavour(request: pytest.FixtureRequest) -> str:
    try:
        load_module(request.param)
    except EngineError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.mark.parametrize("speculative", [True, False])
def test_greedy_outputs_are_those_of_the_cpu(flavour: str, export: Export, pair_bundle: Path, speculative: bool) -> None:
    from dspark.export.build import BuildOptions

    capability = device_capability()
    assert capability is not None, "there is no CUDA device here"
    bundle = export(PAIR, dtype="fp32", build=BuildOptions(flavour, (capability,)))
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    expected = LLM(pair_bundle).generate(PROMPTS, params, speculative=speculative)
    llm = LLM(bundle, backend=flavour)
    actual = llm.generate(PROMPTS, params, speculative=speculative)
    assert [o.token_ids for o in actual] == [o.token_ids for o in expected]
