"""TensorRT's callbacks of a plugin's life, called in TensorRT's order on a stand-in module: fields, shapes, formats, enqueue, faults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from fake_tensorrt import FakeTensorRT

from dspark.plugins import launch, registry
from dspark.plugins.contract import BLOCK_ATTENTION, RING_WRITE
from dspark.plugins.rules import PluginError

RING = [(2, 4, 2064, 128), (2, 4, 8, 128), (2,)]
BLOCK = [(2, 32, 7, 128), (2, 4, 2064, 128), (2, 4, 2064, 128), (2, 4, 7, 128), (2, 4, 7, 128), (2,), (2,)]
ATTRIBUTES = {"scale": 0.125, "window": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128}


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    monkeypatch.setattr(registry, "_registered", {})
    registry.faults.clear()
    fake = FakeTensorRT(FakeCuda())
    fake.TensorFormat = SimpleNamespace(LINEAR="linear")  # type: ignore[attr-defined]
    fake.DimsExprs = lambda size: [None] * size  # type: ignore[attr-defined]
    registry.register(fake)
    return fake


def make(trt: FakeTensorRT, name: str, attributes: dict[str, Any] | None = None) -> Any:
    """Make a plugin as TensorRT does from a node: the creator's fields, with values."""
    creator = trt.creators[name, "1", "dspark"]
    given = ATTRIBUTES if attributes is None else attributes
    fields = [SimpleNamespace(name=key, data=np.array([value]), type=None) for key, value in given.items()]
    return creator.create_plugin("node", fields, "build")


def described(shape: tuple[int, ...], dtype: str) -> Any:
    return SimpleNamespace(dims=shape, max=shape, type=SimpleNamespace(name=dtype), format="linear", desc=None)


def of_shapes(shapes: list[tuple[int, ...]], dtype: str = "HALF") -> list[Any]:
    tensors = [described(shape, "INT64" if len(shape) == 1 else dtype) for shape in shapes]
    for tensor in tensors:
        tensor.desc = tensor
    return tensors


def test_shapes_and_dtypes_of_outputs(trt: FakeTensorRT) -> None:
    def size(number: int) -> Any:
        return SimpleNamespace(is_constant=lambda: number > 0, get_constant_value=lambda: number)

    for name, shapes, expected in (("RingWrite", RING, RING[0]), ("BlockAttention", BLOCK, BLOCK[0])):
        plugin = make(trt, name, {} if name == "RingWrite" else None)
        (output,) = plugin.get_output_shapes([[size(n) for n in shape] for shape in shapes], [], None)
        assert [n.get_constant_value() for n in output] == list(expected)
        assert plugin.get_output_data_types(["half", *["other"] * (len(shapes) - 1)]) == ["half"]
    assert make(trt, "RingWrite", {}).get_aliased_input(0) == 0 and make(trt, "BlockAttention").get_aliased_input(0) == -1
    dynamic = [[size(-1), *map(size, shape[1:])] for shape in BLOCK]
    (output,) = make(trt, "BlockAttention").get_output_shapes(dynamic, [], None)
    assert output[0] is dynamic[0][0], "the batch is an expression of the input's"


def test_formats(trt: FakeTensorRT) -> None:
    plugin = make(trt, "BlockAttention")
    tensors = of_shapes([*BLOCK, BLOCK[0]])
    assert all(plugin.supports_format_combination(i, tensors, 7) for i in range(8))
    tensors[2].type = SimpleNamespace(name="BF16")
    assert not plugin.supports_format_combination(2, tensors, 7)
    tensors[1].format = "chw32"
    assert not plugin.supports_format_combination(1, tensors, 7)


def test_a_plugin_survives_its_engine_file(trt: FakeTensorRT) -> None:
    """What is written into an engine makes the same plugin again."""
    plugin = make(trt, "BlockAttention")
    again = trt.creators["BlockAttention", "1", "dspark"].create_plugin("node", plugin.get_fields_to_serialize(), "runtime")
    assert again.attributes == pytest.approx(ATTRIBUTES) and type(again.attributes["window"]) is int
    assert plugin.clone().attributes == plugin.attributes and plugin.clone() is not plugin


@pytest.mark.parametrize(("name", "shapes"), [("RingWrite", RING), ("BlockAttention", BLOCK)])
def test_enqueue_only_launches(trt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch, name: str, shapes: list[tuple[int, ...]]) -> None:
    """Kernels are prepared when shapes are set, again when they change; an enqueue launches those with the addresses by name."""
    prepared: list[Any] = []
    launched: list[Any] = []

    def prepare(operator: Any, dtype: str, sizes: dict[str, int], attributes: dict[str, Any]) -> str:
        prepared.append((operator.name, dtype, sizes["B"], sizes["D"], attributes))
        return f"kernels for {sizes['B']}"

    monkeypatch.setattr(launch, "prepare", prepare)
    monkeypatch.setattr(launch, "launch", lambda *arguments: launched.append(arguments))
    attributes = {} if name == "RingWrite" else ATTRIBUTES
    plugin = make(trt, name, attributes).attach_to_context(None)
    plugin.configure_plugin(of_shapes(shapes), [])
    inputs, operator = list(range(100, 100 + len(shapes))), RING_WRITE if name == "RingWrite" else BLOCK_ATTENTION
    for batch in (2, 1):
        plugin.on_shape_change(of_shapes([(batch, *shape[1:]) for shape in shapes]), [])
        for stream in (7, 8):
            plugin.enqueue([], [], inputs, [500], 900, stream)
    assert prepared == [(name, "fp16", batch, 128, attributes) for batch in (2, 1)]
    addresses = dict(zip(operator.inputs, inputs, strict=True)) | {next(iter(operator.outputs)): 500, "workspace": 900}
    assert launched == [(f"kernels for {batch}", addresses, stream) for batch in (2, 1) for stream in (7, 8)]


def test_scratch_memory_is_enough_for_every_batch(trt: FakeTensorRT) -> None:
    """Asked once for the largest shapes, it must hold the partial results of smaller batches too, which are split more."""
    plugin = make(trt, "BlockAttention")
    sizes = [plugin.get_workspace_size(of_shapes([(batch, *shape[1:]) for shape in BLOCK]), []) for batch in (1, 2, 8, 64)]
    assert sizes == sorted(sizes) and sizes[0] > 0
    assert make(trt, "RingWrite", {}).get_workspace_size(of_shapes(RING), []) == 0


def test_faults_are_kept_for_the_message(trt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT reports only that a callback failed; what it said is in `faults`."""
    with pytest.raises(PluginError):
        make(trt, "BlockAttention", ATTRIBUTES | {"window": 2048.0})
    with pytest.raises(PluginError):
        make(trt, "RingWrite", {}).configure_plugin(of_shapes([RING[0], (2, 4, 3000, 128), RING[2]]), [])

    def fails(*_: Any) -> None:
        raise PluginError("kernel block_attention: CUDA says CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(launch, "launch", fails)
    with pytest.raises(PluginError):
        make(trt, "RingWrite", {}).enqueue([], [], [1, 2, 3], [4], 0, 7)
    assert "attribute window is 2048.0 (float), expected int" in registry.faults[0]
    assert "3000 rows do not fit a ring of 2064" in registry.faults[1]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in registry.faults[2]


def test_what_is_registered_is_listed(trt: FakeTensorRT) -> None:
    registry.check_registered(trt)
    del trt.creators["RingWrite", "1", "dspark"]
    with pytest.raises(PluginError, match=r"dspark::RingWrite version 1 not registered.*registered are dspark::BlockAttention version 1"):
        registry.check_registered(trt)
