"""Device memory and its one stream, on a fake device that runs nothing before it is waited for."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from fake_cuda import FakeCuda

from dspark.runtime import device as device_module
from dspark.runtime.cuda import Cuda
from dspark.runtime.device import Device, DeviceTensor
from dspark.runtime.errors import EngineError


@pytest.fixture
def device() -> Device:
    return Device(FakeCuda())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int64", "bf16"])
def test_values_come_back(device: Device, dtype: str) -> None:
    tensor = device.tensor((3, 5), dtype)
    assert not tensor.read().any()
    values = np.arange(15).reshape(3, 5)
    tensor.write(values)
    np.testing.assert_array_equal(tensor.read(), values)
    tensor.rows(1, 2).write(-values[:2])
    np.testing.assert_array_equal(tensor.read(), np.concatenate([values[:1], -values[:2]]))
    np.testing.assert_array_equal(tensor.rows(2, 1).read(), -values[1:2])
    tensor.write(7)
    assert (tensor.read() == 7).all()
    tensor.rows(0, 2).write(0)
    np.testing.assert_array_equal(tensor.read(), [[0] * 5, [0] * 5, [7] * 5])


def test_bfloat16_rounds_as_ml_dtypes_does(device: Device) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    values[:4] = 1.00390625, 1.01171875, np.inf, -0.0  # ties, one of them to even
    values = np.where(np.abs(values) > 3.3e38, 1.0, values).astype(np.float32)  # what rounds to infinity
    values[4] = np.inf
    values[np.isnan(values)] = np.nan  # ml_dtypes warns of signalling ones
    tensor = device.tensor(values.shape, "bf16")
    tensor.write(values)
    np.testing.assert_array_equal(tensor.read(), values.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_the_host_may_change_what_it_wrote(device: Device) -> None:
    """Writes are staged: neither the caller's array nor a later write reaches an earlier tensor."""
    first, second, values = device.tensor((4,), "int64"), device.tensor((4,), "int64"), np.arange(4)
    first.write(values)
    values += 10
    second.write(values)
    values += 10
    np.testing.assert_array_equal(first.read(), [0, 1, 2, 3])
    np.testing.assert_array_equal(second.read(), [10, 11, 12, 13])


def test_more_is_staged_than_the_buffer_holds(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_STAGING", 1000)
    device = Device(device.cuda)
    tensors = [device.tensor((77,), "int64") for _ in range(9)]
    for number, tensor in enumerate(tensors):
        tensor.write(np.arange(77) + 1000 * number)
    for number, tensor in enumerate(tensors):
        np.testing.assert_array_equal(tensor.read(), np.arange(77) + 1000 * number)
    large = device.tensor((5000,), "fp32")
    large.write(np.arange(5000))
    np.testing.assert_array_equal(large.read(), np.arange(5000))


def test_copies_stay_on_the_device(device: Device) -> None:
    source, narrow, same = device.tensor((3, 8), "int64"), device.tensor((3, 5), "int64"), device.tensor((3, 8), "int64")
    values = np.arange(24).reshape(3, 8)
    source.write(values)
    device.cuda.calls.clear()
    narrow.copy(source)
    same.copy(source)
    source.write(0)
    assert not device.cuda.calls["copy_out"] and not device.cuda.calls["synchronize"]
    np.testing.assert_array_equal(narrow.read(), values[:, :5])
    np.testing.assert_array_equal(same.read(), values)


def test_small_tensors_come_in_one_copy(device: Device) -> None:
    tensors = [device.tensor((8,), "int64"), device.tensor((8, 17), "int64"), device.tensor((8, 16), "fp32")]
    for number, tensor in enumerate(tensors):
        tensor.write(np.full(tensor.shape, number + 1))
    device.cuda.calls.clear()
    for number, values in enumerate(device.fetch(tensors)):
        assert (values == number + 1).all() and values.shape == tensors[number].shape
    assert device.cuda.calls["copy_out"] == device.cuda.calls["synchronize"] == 1
    large = device.tensor((1 << 16,), "fp32")
    large.write(3)
    both = device.fetch([tensors[0], large])
    assert (both[0] == 1).all() and (both[1] == 3).all()


def test_memory_is_used_again_and_freed(device: Device) -> None:
    """A small tensor's place goes to the next of its size, in whatever order they end; large ones give theirs back."""
    kept = device.tensor((4,), "int64")
    kept.write(5)
    before = len(device.cuda.live)
    for _ in range(2000):
        device.tensor((4,), "int64").write(9)
    assert len(device.cuda.live) == before
    assert (kept.read() == 5).all()
    large = device.tensor((100_000,), "fp32")
    rows = large.rows(10, 20)
    del large
    gc.collect()
    rows.write(1)
    assert (rows.read() == 1).all(), "rows keep the memory"
    del rows
    gc.collect()
    assert len(device.cuda.live) == before + 1, "what is enqueued may still need it"
    kept.read()
    assert len(device.cuda.live) == before


def test_a_device_that_is_dropped_frees_everything() -> None:
    """Whatever goes first, the device or its tensors."""
    cuda = FakeCuda()
    device = Device(cuda)  # type: ignore[arg-type]
    memory = device.tensor((100_000,), "fp32").memory
    small = device.tensor((4,), "int64").memory
    del device
    gc.collect()
    assert len(cuda.live) == 2
    del memory, small
    gc.collect()
    assert not cuda.live


def test_tensors_of_one_device_only(device: Device) -> None:
    with pytest.raises(AssertionError):
        device.tensor((2, 3), "int64").copy(device.tensor((4, 3), "int64"))
    assert isinstance(device.tensor((1,), "fp32"), DeviceTensor)


def test_an_error_of_the_device_is_named(device: Device) -> None:
    device.cuda.fail.add("synchronize")
    with pytest.raises(EngineError, match="synchronize failed: cudaErrorIllegalAddress"):
        device.tensor((2,), "int64").read()


def test_without_a_device_the_remedy_is_named() -> None:
    """Here either cuda-bindings is missing, or there is no driver; on a machine with a device there is nothing to refuse."""
    try:
        cuda = Cuda()
    except EngineError as error:
        assert 'pip install "dspark[cuda]"' in str(error)
    else:
        assert cuda.available_memory() > 0
