"""Quantised weights in numbers and on disk: against a plain loop, against ONNX Runtime's kernel, and as a safetensors file."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from conftest import PAIR, SMALL
from onnx import TensorProto, helper, numpy_helper
from random_pair import drafter_config, drafter_tensors, target_config, target_tensors, write_checkpoint, write_pair
from safetensors import safe_open

from dspark.export import checkpoint
from dspark.export.lower_weights import ACCURACY_LEVEL, NBITS, NBITS_DOMAIN
from dspark.export.pair import load_pair
from dspark.export.quantize import dequantize, packed_shape, quantize_rows, quantized_bits
from dspark.export.weights import Weights
from dspark.runtime.bundle import GROUP_SIZES, WEIGHTS, Quantization
from dspark.runtime.errors import CheckpointError

BITS = (8, 4)
INT8, INT4 = (Quantization(32, bits, bits, 8) for bits in BITS)


def by_a_plain_loop(rows: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Return what quantised rows stand for, group by group and entry by entry."""
    half, result = 2 ** (bits - 1), np.zeros(rows.shape)
    for i, row in enumerate(rows.astype(np.float64)):
        for begin in range(0, len(row), group):
            part = row[begin : begin + group]
            largest = max(part, key=abs)
            for j, value in enumerate(part):
                step = largest / -half
                integer = 0 if step == 0 else max(-half, min(half - 1, round(value / step)))
                result[i, begin + j] = integer * step
    return result


@pytest.mark.parametrize("columns", [64, 72, 8])
@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_numbers(bits: int, group: int, columns: int) -> None:
    """Half a step at most, one for an entry as large as the largest and of the other sign; whole groups of zeros stay zero."""
    rows = np.random.default_rng(0).standard_normal((12, columns)).astype(np.float32)
    rows[3], rows[4], rows[5, ::2], rows[5, 1::2] = 0, 1e-42, -1.5, 1.5
    packed, scales = quantize_rows(rows, bits, group, "w")
    assert packed.shape == packed_shape(rows.shape, bits, group)
    assert scales.shape == packed.shape[:2]
    back = dequantize(packed, scales, bits, columns)
    np.testing.assert_allclose(back[:3], by_a_plain_loop(rows[:3], bits, group), rtol=1e-6)
    assert (back[3:5] == 0).all()
    steps = np.repeat(np.abs(scales), group, 1)[:, :columns]
    assert set(np.abs(back - rows)[5] / steps[5]) == {0, 1}
    assert (np.abs(back - rows)[:3] <= steps[:3] * 1.0001).all()
    typical = np.abs(back - rows)[:3].mean() / steps[:3].mean()
    assert 0.2 < typical < 0.3, "uniform errors within half a step have a mean of a quarter"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    rows = np.ones((2, 64), np.float32)
    rows[1, 40] = value
    with pytest.raises(CheckpointError, match=r"layers\.0\.w has infinite or not-a-number entries"):
        quantize_rows(rows, 8, 32, "layers.0.w")


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("columns", [64, 72, 8, 1040])
@pytest.mark.parametrize("bits", BITS)
def test_the_kernel_reads_them_so(bits: int, columns: int, group: int) -> None:
    """In float32, level 1: the product with what the integers stand for. As exported: inputs are rounded to 8 bits, group by group."""
    rng = np.random.default_rng(1)
    w, x = (rng.standard_normal((n, columns)).astype(np.float32) for n in (40, 9))
    packed, scales = quantize_rows(w, bits, group, "w")
    meant = dequantize(packed, scales, bits, columns).astype(np.float64)
    exact = x.astype(np.float64) @ meant.T
    spare = -columns % group
    grouped = np.pad(x, ((0, 0), (0, spare))).reshape(9, -1, group)
    steps = np.abs(grouped).max(-1, keepdims=True) / 127
    rounded = (np.rint(grouped / steps) * steps).reshape(9, -1)[:, :columns].astype(np.float64) @ meant.T
    for level, expected in ((1, exact), (ACCURACY_LEVEL, rounded)):
        node = helper.make_node(
            NBITS, ["x", "q", "s"], ["y"], domain=NBITS_DOMAIN, K=columns, N=40, bits=bits, block_size=group, accuracy_level=level
        )
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["R", n]) for name, n in (("x", columns), ("y", 40))]
        weights = [numpy_helper.from_array(packed, "q"), numpy_helper.from_array(scales, "s")]
        graph = helper.make_graph([node], "g", infos[:1], infos[1:], weights)
        imports = [helper.make_opsetid("", 24), helper.make_opsetid(NBITS_DOMAIN, 1)]
        session = onnxruntime.InferenceSession(
            helper.make_model(graph, opset_imports=imports, ir_version=11).SerializeToString(), providers=["CPUExecutionProvider"]
        )
        (y,) = session.run(None, {"x": x})
        # Another CPU kind may round the inputs by row instead of by group.
        np.testing.assert_allclose(y, exact, atol=0.02 * np.abs(exact).max())
        np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(exact).max() if level == 1 else 0.01 * np.abs(exact).max())


def test_what_is_quantized() -> None:
    """The layers' projections, the heads and the Markov head's output; each model at its own bits."""
    quantization = Quantization(32, 4, 8, 8)
    pair = load_pair(PAIR / "target", PAIR / "drafter")
    for model, tensors, bits in (("target", pair.target_tensors, 4), ("drafter", pair.drafter_tensors, 8)):
        found = {name: quantized_bits(model, name, quantization) for name in tensors}
        quantised = {name for name, value in found.items() if value is not None}
        layers = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
        assert len([name for name in quantised if name.startswith("layers.")]) == 7 * layers
        assert quantised - {n for n in quantised if n.startswith("layers.")} == {"lm_head.weight"} | (
            {"markov_head.markov_w2.weight"} if model == "drafter" else set()
        )
        assert {found[name] for name in quantised} == {bits}
    assert quantized_bits("drafter", "markov_head.markov_w2.weight", INT4) == 8
    assert quantized_bits("drafter", "markov_head.gate_proj.weight", INT4) is None


def stored(bundle: Path) -> dict[str, np.ndarray]:
    with safe_open(bundle / WEIGHTS, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pair in bf16 whose target ties its head, and whose drafter has neither embedding nor head of its own."""
    directory, shape = tmp_path_factory.mktemp("tied"), replace(SMALL, tied=True)
    write_checkpoint(directory / "target", target_config(shape), target_tensors(shape), dtype="bf16", seed=1)
    own = {name: size for name, size in drafter_tensors(shape).items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    write_checkpoint(directory / "drafter", drafter_config(shape), own, dtype="bf16", seed=2)
    return directory


def write(weights: Weights, directory: Path) -> Path:
    directory.mkdir()
    weights.write(directory, lambda *_: None)
    return directory


def test_forms_on_disk(tied: Path, tmp_path: Path) -> None:
    """A tied table is there as it is stored and once for each number of bits; all entries lie aligned; bytes are as computed."""
    weights = Weights(load_pair(tied / "target", tied / "drafter"), "fp32", copy=False, quantization=Quantization(16, 8, 4, 8))
    tensors, table = stored(write(weights, tmp_path / "bundle")), "target.embed_tokens.weight"
    assert sorted(name for name in tensors if name.startswith(table)) == [
        f"{table}.{form}" for form in ("bf16", "int4", "int4.scales", "int8", "int8.scales")
    ]
    with safe_open(tied / "target" / "model.safetensors", "pt") as file:
        original = file.get_tensor("model.embed_tokens.weight")
    assert (tensors[f"{table}.bf16"] == original).all()
    for bits in BITS:
        packed, scales = (tensors[f"{table}.int{bits}{part}"].numpy() for part in ("", ".scales"))
        steps = np.repeat(np.abs(scales), 16, 1)
        assert (np.abs(dequantize(packed, scales, bits, 64) - original.float().numpy()) <= steps * 1.0001).all()
    assert tensors["drafter.markov_head.markov_w2.weight.int8"].shape == (320, 1, 16)
    assert str(tensors["drafter.fc.weight"].dtype) == "torch.float32"
    assert str(tensors["drafter.markov_head.markov_w1.weight.bf16"].dtype) == "torch.bfloat16"
    for model in ("target", "drafter"):
        forms = weights.forms(model)(table)
        assert forms.bits == {"target": 8, "drafter": 4}[model]
        assert forms.plain is None
    assert all(place.offset % min(place.length & -place.length, 64) == 0 for place in weights._places.values())


def test_float_drafter_beside_a_quantized_target(tied: Path, tmp_path: Path) -> None:
    weights = Weights(load_pair(tied / "target", tied / "drafter"), "fp32", copy=False, quantization=Quantization(32, 4, None, None))
    tensors, table = stored(write(weights, tmp_path / "bundle")), "target.embed_tokens.weight"
    assert {f"{table}.bf16", f"{table}.int4", table} <= tensors.keys()
    assert not any(".int" in name for name in tensors if name.startswith("drafter."))


def test_chunks_change_no_byte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A weight larger than a chunk is quantised in whole rows: the same bytes as at once."""
    hashes = []
    for elements in (1 << 22, 5000):
        monkeypatch.setattr(checkpoint, "_CHUNK", elements)
        weights = Weights(load_pair(PAIR / "target", PAIR / "drafter"), "fp32", copy=False, quantization=INT4)
        hashes.append(hashlib.sha256((write(weights, tmp_path / str(elements)) / WEIGHTS).read_bytes()).hexdigest())
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_every_stored_dtype(tmp_path: Path, dtype: str) -> None:
    """Tables stay in it; float32 ones need no second form."""
    write_pair(tmp_path, SMALL, dtype=dtype, deviation=0.15)
    weights = Weights(load_pair(tmp_path / "target", tmp_path / "drafter"), "fp32", copy=False, quantization=INT8)
    forms = weights.forms("target")("target.embed_tokens.weight")
    assert forms.table is not None
    assert forms.table.dtype.numpy() == {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    assert (forms.plain is forms.table) == (dtype == "fp32")
    assert forms.product is None
    assert weights.forms("target")("target.lm_head.weight").bits == 8
