"""Operators from three independent sources: numpy reference, torch, and ONNX Runtime on the function bodies."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from dspark.export import ops
from dspark.export.choice import greedy_choice
from dspark.export.functions import operator_functions
from dspark.plugins import contract, reference

# batch, query heads, kv heads, head dim, block rows, ring capacity
SHAPES = [(1, 4, 2, 16, 7, 32), (3, 4, 1, 8, 7, 16), (2, 6, 6, 4, 1, 48), (2, 8, 2, 64, 16, 16)]


def run_function(operator: contract.Operator, inputs: dict[str, np.ndarray], opset: int = 24, **attributes: float) -> np.ndarray:
    """Run one operator's function body in ONNX Runtime."""
    types = {
        np.dtype(np.float32): TensorProto.FLOAT,
        np.dtype(np.float16): TensorProto.FLOAT16,
        np.dtype(np.int64): TensorProto.INT64,
    }
    types[np.dtype(bool)] = TensorProto.BOOL
    (output,) = operator.outputs
    node = helper.make_node(operator.name, list(inputs), [output], domain=contract.DOMAIN, **attributes)
    declared = [helper.make_tensor_value_info(n, types[v.dtype], [None] * v.ndim) for n, v in inputs.items()]
    first = next(iter(inputs.values()))
    graph = helper.make_graph([node], "g", declared, [helper.make_tensor_value_info(output, types[first.dtype], [None] * 4)])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(contract.DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, functions=[operator_functions(opset)[operator.name]], ir_version=11)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


def as_torch(values: dict[str, np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(v) for v in values.values()]


@pytest.mark.parametrize("opset", [24, 25])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_ring_write(rows: int, opset: int) -> None:
    """Wrap-around, ragged starts, and starts far beyond 2**31."""
    rng = np.random.default_rng(rows)
    ring = rng.standard_normal((4, 2, 16, 8)).astype(np.float32)
    values = {
        "ring": ring,
        "rows": rng.standard_normal((4, 2, rows, 8)).astype(np.float32),
        "start": np.array([0, 13, 35, 2**31 + 5]),
    }
    expected = reference.ring_write(*values.values())
    np.testing.assert_array_equal(run_function(contract.RING_WRITE, values, opset), expected)
    np.testing.assert_array_equal(ops.ring_write(*as_torch(values)).numpy(), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [1, 9, 1 << 40])
def test_block_attention(shape: tuple[int, ...], window: int) -> None:
    """Empty, partly full, full and wrapped rings; holes at the front; grouped queries. NaN in hidden slots must not show."""
    batch, heads, kv_heads, dim, block, capacity = shape
    rng = np.random.default_rng(0)
    totals = np.array([0, capacity // 2, capacity, 3 * capacity + 5])
    for total, first in [(totals, 0 * totals), (totals, np.maximum(totals - 3, 0)), (totals, totals)]:
        total, first = np.resize(total, batch).astype(np.int64), np.resize(first, batch).astype(np.int64)
        for shift in range(2):
            total, first = np.roll(total, shift), np.roll(first, shift)
            values = {
                "query": rng.standard_normal((batch, heads, block, dim)).astype(np.float32),
                "ring_key": rng.standard_normal((batch, kv_heads, capacity, dim)).astype(np.float32),
                "ring_value": rng.standard_normal((batch, kv_heads, capacity, dim)).astype(np.float32),
                "block_key": rng.standard_normal((batch, kv_heads, block, dim)).astype(np.float32),
                "block_value": rng.standard_normal((batch, kv_heads, block, dim)).astype(np.float32),
                "total": total,
                "first": first,
            }
            for b in range(batch):
                hidden = set(range(capacity)) - set(reference.visible_slots(int(total[b]), int(first[b]), window, capacity))
                values["ring_key"][b, :, sorted(hidden)] = 1e4
            scale = dim**-0.5
            expected = reference.block_attention(*values.values(), scale=scale, window=window)
            sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
            ours = run_function(contract.BLOCK_ATTENTION, values, scale=scale, window=window, **sizes)
            np.testing.assert_allclose(ours, expected, atol=2e-6)
            np.testing.assert_allclose(ops.block_attention(*as_torch(values), scale=scale, window=window), expected, atol=2e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize("rows", [1, 8])
def test_cached_attention(heads: int, kv_heads: int, rows: int) -> None:
    rng, start, capacity = np.random.default_rng(2), np.array([0, 3, 24]), 32
    values = {
        "query": rng.standard_normal((3, heads, rows, 16)).astype(np.float32),
        "key_cache": rng.standard_normal((3, kv_heads, capacity, 16)).astype(np.float32),
        "value_cache": rng.standard_normal((3, kv_heads, capacity, 16)).astype(np.float32),
        "start": start,
    }
    expected = reference.cached_attention(*values.values(), scale=0.25)
    positions = np.tile(start[:, None] + np.arange(rows), heads // kv_heads)
    values["visible"] = (np.arange(capacity) <= positions[:, :, None])[:, None]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 16}
    np.testing.assert_allclose(run_function(contract.CACHED_ATTENTION, values, scale=0.25, **sizes), expected, atol=2e-6)
    np.testing.assert_allclose(ops.cached_attention(*as_torch(values), scale=0.25).numpy(), expected, atol=2e-6)


def test_float16_softmax_is_in_float32() -> None:
    """Scores beyond float16's range survive: the products are what overflow, so keep them just below."""
    query = np.full((1, 1, 1, 16), 60, np.float16)
    key = np.full((1, 1, 16, 16), 60, np.float16)
    key[0, 0, 1] = 61
    values = {"query": query, "ring_key": key, "ring_value": key, "block_key": key[:, :, :1], "block_value": key[:, :, :1]}
    values |= {"total": np.array([16]), "first": np.array([0])}
    sizes = {"heads": 1, "kv_heads": 1, "head_dim": 16}
    ours = run_function(contract.BLOCK_ATTENTION, values, scale=0.25, window=64, **sizes)
    np.testing.assert_allclose(ours.astype(np.float64), 61, atol=0.05)


def test_choice_is_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [2.0, 2.0, 2.0, 2.0], [-5.0, -9.0, -7.0, -5.0], [float("-inf")] * 3 + [0.0]])
    assert greedy_choice(logits).tolist() == [1, 0, 0, 3]
    assert greedy_choice(logits.to(torch.bfloat16)).tolist() == [1, 0, 0, 3]


def test_contract_and_functions_agree() -> None:
    functions = operator_functions(24)
    assert functions.keys() == {operator.name for operator in contract.OPERATORS}
    for operator in contract.OPERATORS:
        function = functions[operator.name]
        assert list(function.input) == list(operator.inputs)
        assert list(function.output) == list(operator.outputs)
        assert list(function.attribute) == list(operator.attributes)
        assert {node.domain for node in function.node} <= {""}
