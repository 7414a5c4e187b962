"""Graphs of quantised bundles: which nodes they have, that rows do not depend on their neighbours, that verification can fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import PAIR
from engines import Parts, open_parts

from dspark.export import verify
from dspark.export.build import BuildOptions
from dspark.export.bundle import ExportOptions, export_bundle
from dspark.export.lower_weights import ACCURACY_LEVEL, NBITS, NBITS_DOMAIN
from dspark.runtime.bundle import load_bundle
from dspark.runtime.errors import ConfigError
from dspark.runtime.state import Rows

QUANTIZED = pytest.mark.parametrize("each_bundle", ["int8", "int4"], indirect=True)


def nodes(bundle: Path, graph: str, op_type: str) -> list[onnx.NodeProto]:
    model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
    return [node for node in model.graph.node if node.op_type == op_type]


@QUANTIZED
def test_nodes(each_bundle: Path) -> None:
    """Every large product is MatMulNBits, the Markov head's in 8 bits; `fc` and the confidence head stay; 4-bit rows are never alone."""
    bits = load_bundle(each_bundle).manifest.quantization.target_bits
    # Six target layers; two drafter layers, of which the context takes keys and values; heads; seven Markov steps.
    expected = {"target": (6 * 7 + 1, 0), "context": (2 * 2, 0), "draft": (2 * 2 + 2 * 7 + 1, 7), "draft_sampled": (2 * 2 + 2 * 7 + 1, 7)}
    left = {"target": 0, "context": 1, "draft": 1 + 7, "draft_sampled": 1 + 7}
    for graph, (large, markov) in expected.items():
        made = nodes(each_bundle, graph, NBITS)
        found = [{a.name: a.i for a in node.attribute} for node in made]
        assert {node.domain for node in made} == {NBITS_DOMAIN}
        assert {(f["block_size"], f["accuracy_level"]) for f in found} == {(32, ACCURACY_LEVEL)}
        by_weight = ["markov" in node.input[1] for node in made]
        assert (by_weight.count(False), by_weight.count(True)) == (large, markov)
        assert {f["bits"] for f, is_markov in zip(found, by_weight, strict=True) if not is_markov} == {bits}
        assert {f["bits"] for f, is_markov in zip(found, by_weight, strict=True) if is_markov} <= {8}
        kept = [node.input[1] for node in nodes(each_bundle, graph, "Gemm")]
        assert len(kept) == left[graph]
        assert {name.split(".")[1] for name in kept} <= {"fc", "confidence_head"}
        padded = {node.output[0] for node in nodes(each_bundle, graph, "Pad")}
        several = [node for node in made if node.input[0] in padded]
        # The drafter's block has seven rows a request: of its products only those of the context may have one.
        assert len(several) == (0 if bits == 8 else {"target": large}.get(graph, 2 * 2))


def rows_of(parts: Parts, tokens: list[int], widths: list[int], batch: int) -> np.ndarray:
    """Return the logits and taps of every token behind a prompt, fed in rounds of `widths` beside `batch` - 1 others."""
    names, found, fed = list(range(batch)), [], 0
    for name in names:
        parts.slots.admit(name)
        parts.target.prefill(name, [7, 3, 99, 5 + name])
    while fed < len(tokens):
        width = min(widths[len(found) % len(widths)], len(tokens) - fed)
        view = parts.slots.view(names)
        fed_tokens = parts.engine.allocate((view.size, width), "int64")
        fed_tokens.write(np.tile(tokens[fed : fed + width], (view.size, 1)))
        verified = parts.target.verify(names, Rows(view, fed_tokens), [width - 1] * batch)
        found.append(np.concatenate([verified.logits.tensor.read()[0, :width], verified.taps.tensor.read()[0, :width]], -1))
        for name in names:
            parts.target.commit(name, width)
        fed += width
    return np.concatenate(found)


@QUANTIZED
def test_rows_do_not_depend_on_their_number(each_bundle: Path) -> None:
    """The same bits for a row alone, in any width of round, beside other requests: inputs are rounded row by row, sums keep their order.

    What losslessness rests on, since a difference in the last bit grows where inputs are rounded. Another CPU kind may fail here.
    """
    tokens = np.random.default_rng(0).integers(0, 300, 40).tolist()
    expected = rows_of(open_parts(each_bundle), tokens, [8], 1)
    for widths, batch in (([1], 1), ([2], 1), ([3], 1), ([1, 7], 1), ([8], 4), ([1], 2)):
        assert (rows_of(open_parts(each_bundle), tokens, widths, batch) == expected).all(), (widths, batch)


@QUANTIZED
def test_verification(each_bundle: Path, small_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 as close as floats, as exported within what rounding the inputs does; weights that are a little off are noticed."""
    pair = small_pair / "target", small_pair / "drafter"
    report = {row.name: row for row in verify.verify_bundle(each_bundle, *pair, threads=1)}
    assert all(row.passed for row in report.values()), report
    assert report["verify logits"].tolerance == 1e-4
    assert report["verify logits, rounded"].difference > 100 * report["verify logits"].difference
    dequantize = verify.dequantize
    monkeypatch.setattr(verify, "dequantize", lambda *arguments: 1.01 * dequantize(*arguments))
    assert not all(row.passed for row in verify.verify_bundle(each_bundle, *pair, threads=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int3"}, "'int3' is no form of weights, expected one of float, int8, int4"),
        ({"weights": "int8", "drafter_weights": "fp8"}, "'fp8' is no form of weights"),
        ({"group_size": 32}, "group_size is about quantised weights: choose weights int8 or int4"),
        ({"weights": "int8", "group_size": 48}, "group_size is 48, expected one of 16, 32, 64, 128, 256"),
        ({"weights": "int8", "dtype": "fp16"}, "dtype is 'fp16', quantised weights go with fp32"),
        ({"weights": "int4", "build": BuildOptions("tensorrt-rtx", ("8.9",))}, "quantised weights run on ONNX Runtime alone"),
        ({"markov_topk": 0}, "markov_topk is 0, expected 1..2048"),
        ({"markov_topk": 2049}, "markov_topk is 2049, expected 1..2048"),
    ],
)
def test_what_cannot_be(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        export_bundle(PAIR / "target", PAIR / "drafter", tmp_path / "out", ExportOptions(**options))
    assert not (tmp_path / "out").exists()
