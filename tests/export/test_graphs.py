"""The exported ONNX files: what is in them, that they load anywhere, and that run-time sizes stay free."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import oracle
import pytest
from conftest import GOLDEN, SMALL, Export
from engines import open_parts
from random_pair import drafter_config, drafter_tensors, target_config, target_tensors, write_checkpoint, write_pair

from dspark.plugins.contract import DOMAIN, PLUGIN_ATTRIBUTES
from dspark.runtime.graphs import CONTEXT, GRAPHS, signatures
from dspark.runtime.state import View


@pytest.fixture(scope="module")
def bundle(export: Export) -> Path:
    return export(GOLDEN / "vanilla", ctx_window="full", debug_outputs=True, copy_weights=True)


@pytest.mark.parametrize("graph", GRAPHS)
def test_domains_functions_and_attributes(bundle: Path, graph: str) -> None:
    """Only our three operators beside the standard ones, each with its function; none is left after inlining (case G6)."""
    path = bundle / f"{graph}.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path, load_external_data=False)
    ours = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    expected = {
        "context": {"RingWrite"},
        "draft": {"RingWrite", "BlockAttention"},
        "draft_sampled": {"RingWrite", "BlockAttention"},
        "target": {"CachedAttention"},
    }
    assert ours == expected.get(graph, set()) == {function.name for function in model.functions}
    assert {node.domain for node in model.graph.node} <= {"", DOMAIN}
    for node in model.graph.node:
        if node.op_type in ("RingWrite", "BlockAttention"):
            attributes = {a.name: a.s.decode() for a in node.attribute if a.type == onnx.AttributeProto.STRING}
            assert attributes == PLUGIN_ATTRIBUTES
    inlined = onnx.inliner.inline_local_functions(model)
    assert {node.domain for node in inlined.graph.node} == {""}
    assert path.stat().st_size < 1_000_000


@pytest.mark.parametrize("graph", GRAPHS)
def test_state_has_one_reader(bundle: Path, graph: str) -> None:
    """The write is the state input's only consumer, in the file as loaded: ONNX Runtime then writes in place."""
    model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
    states = [i.name for i in model.graph.input if "_ring." in i.name or "_cache." in i.name]
    assert len(states) == {"context": 4, "draft": 4, "draft_sampled": 4, "target": 12}.get(graph, 0)
    for name in states:
        readers = [node for node in model.graph.node if name in node.input]
        assert [node.op_type for node in readers] in (["RingWrite"], ["TensorScatter"])
        assert list(readers[0].output) == [f"{name}.updated"]


@pytest.mark.parametrize("graph", GRAPHS)
def test_signature_and_free_sizes(bundle: Path, graph: str) -> None:
    manifest = open_parts(bundle).engine.manifest
    declared = signatures(manifest.target, manifest.drafter, manifest.num_speculative_tokens, debug_outputs=True)[graph]
    model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
    for values, specs in ((model.graph.input, declared.inputs), (model.graph.output, declared.outputs)):
        assert [v.name for v in values] == [s.name for s in specs]
        for value, spec in zip(values, specs, strict=True):
            dims = tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim)
            assert dims == spec.shape


def test_loads_with_no_extra_library(bundle: Path) -> None:
    for graph in GRAPHS:
        onnxruntime.InferenceSession(bundle / f"{graph}.onnx", providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 7, 32])
@pytest.mark.parametrize("seeded", [0, 3, 200])
def test_sizes_are_not_baked_in(small_bundle: Path, batch: int, rows: int, seeded: int) -> None:
    """Any batch and chunk, on empty, partly full and full rings, equals the same rows written one by one (case G5)."""
    rng = np.random.default_rng(batch * rows + seeded)
    taps = rng.standard_normal((batch, seeded + rows, 3 * 64)).astype(np.float32)
    together, alone = open_parts(small_bundle), open_parts(small_bundle)
    names = list(range(batch))
    for name in names:
        for parts in (together, alone):
            parts.slots.admit(name)
            if seeded:
                parts.drafter.write_context(name, taps[name, :seeded], np.arange(seeded))
    together.drafter.rings.reserve(4, seeded + rows)
    engine, view = together.engine, View(0, batch, tuple(names))
    chunk, start = engine.allocate((batch, rows, 3 * 64), "model"), engine.allocate((batch,), "int64")
    chunk.write(taps[:, seeded:])
    start.write(seeded)
    engine.bind(CONTEXT, {"taps": chunk, "start": start, **together.drafter.rings.tensors(view)}).run()
    together.drafter._total[:batch] = seeded + rows
    drafted = together.drafter.propose(names, [5] * batch).debug["draft_logits"].read()[:batch].copy()
    for name in names:
        for i in range(rows):
            alone.drafter.write_context(name, taps[name, seeded + i : seeded + i + 1], [seeded + i])
        logits = alone.drafter.propose([name], [5]).debug["draft_logits"].read()[0]
        np.testing.assert_allclose(drafted[name], logits, atol=1e-5)


def test_float16_survives_outlier_channels(export: Export, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Captured rows with channels of 2.5e4 overflow a float16 product; `fc` runs in float32 (case G4)."""
    pair = tmp_path_factory.mktemp("half")
    write_pair(pair, SMALL, dtype="fp16", deviation=0.15)
    options = {"ctx_window": 32, "debug_outputs": True, "max_chunk": 64, "max_batch_size": 4}
    taps = np.random.default_rng(0).standard_normal((10, 3 * 64)).astype(np.float32)
    taps[0, [3, 70, 150]] = 2.5e4
    drafts = {}
    for dtype in ("fp16", "fp32"):
        parts = open_parts(export(pair, dtype=dtype, **options))
        parts.slots.admit("r")
        parts.drafter.write_context("r", taps, np.arange(10))
        drafts[dtype] = parts.drafter.propose(["r"], [17])
    ours, exact = (drafts[dtype].debug["draft_logits"].read()[0].astype(np.float64) for dtype in ("fp16", "fp32"))
    assert np.isfinite(ours).all()
    for a, b in zip(ours, exact, strict=True):
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) >= 0.999
    np.testing.assert_array_equal(drafts["fp16"].tokens(), drafts["fp32"].tokens())


def test_a_confidence_head_without_bias(export: Export, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Drafters of other families store no bias (case F8): the graph's confidences are those without one."""
    pair = tmp_path_factory.mktemp("no_bias")
    write_checkpoint(pair / "target", target_config(SMALL), target_tensors(SMALL), dtype="fp32", seed=1, deviation=0.15)
    tensors = {name: size for name, size in drafter_tensors(SMALL).items() if name != "confidence_head.proj.bias"}
    write_checkpoint(pair / "drafter", drafter_config(SMALL), tensors, dtype="fp32", seed=2, deviation=0.15)
    parts = open_parts(export(pair, ctx_window=32))
    parts.slots.admit("r")
    taps = np.random.default_rng(0).standard_normal((10, 3 * 64)).astype(np.float32)
    parts.drafter.write_context("r", taps, np.arange(10))
    proposals = parts.drafter.propose(["r"], [17])
    expected = oracle.Drafter(pair / "drafter").windowed(taps, 10, 17, window=32)
    assert proposals.confidence_logits is not None
    np.testing.assert_allclose(proposals.confidence_logits.read()[0], expected["confidence_logits"], atol=1e-4)
