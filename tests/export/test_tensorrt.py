"""TensorRT-RTX parses and compiles the graphs ahead of time, on a machine with no GPU: for sm_89 and sm_120, in every dtype.

Shown: that the graphs are accepted, that our plugins and TensorRT's fused layers are used, and what is refused. Not shown: numbers,
speed, and that regular TensorRT accepts the same.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from conftest import GOLDEN, PAIR, Export
from random_pair import SHAPES, write_pair

from dspark.export import cli
from dspark.export.build import BuildOptions, BuildPlan, EngineBuilder, parse_capabilities, parse_pools
from dspark.export.lower import lower
from dspark.export.network import Network, expected_layers
from dspark.plugins import kernels, registry
from dspark.plugins.rules import PluginError
from dspark.runtime.bundle import Manifest, load_bundle
from dspark.runtime.engines import EngineRecord, engine_path
from dspark.runtime.errors import BundleError, ConfigError, EngineError, ExportError
from dspark.runtime.flavour import load_module
from dspark.runtime.graphs import ACCEPT, CONTEXT, DRAFT, DRAFT_SAMPLED, GRAPHS, TARGET, signatures

FLAVOUR, CAPABILITIES = "tensorrt-rtx", ("8.9", "12.0")
try:
    trt: Any = load_module(FLAVOUR)
except EngineError as missing:
    pytest.skip(str(missing), allow_module_level=True)

PAIRS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


@pytest.fixture(autouse=True)
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden pairs have head dimension 16, for which there are no kernels; nothing here runs one."""
    monkeypatch.setattr(kernels, "HEAD_DIMS", (16, *kernels.HEAD_DIMS))


def plan_of(manifest: Manifest) -> BuildPlan:
    declared = signatures(manifest.target, manifest.drafter, manifest.num_speculative_tokens, debug_outputs=manifest.debug_outputs)
    capacities = {"R": manifest.ring_capacity, "S": manifest.cache_capacity}
    return BuildPlan(
        manifest.target, manifest.drafter, declared, manifest.dtype, manifest.num_speculative_tokens, manifest.limits, capacities
    )


def build(bundle: Path, scratch: Path, capabilities: tuple[str, ...] = CAPABILITIES, **options: Any) -> dict[str, EngineRecord]:
    """Build the engines of a bundle's graphs in `scratch`."""
    scratch.mkdir(exist_ok=True)
    for path in bundle.glob("*.onnx"):
        shutil.copy(path, scratch)
    manifest = load_bundle(bundle).manifest
    plan = plan_of(manifest)
    plan = replace(plan, signatures={graph: plan.signatures[graph] for graph in options.pop("graphs", GRAPHS)})
    builder = EngineBuilder(BuildOptions(FLAVOUR, capabilities, **options), plan)
    return builder.build(scratch, Path(manifest.weights.root or bundle), lambda _: None)


def network(bundle: Path, graph: str, model: onnx.ModelProto | None = None, **changes: Any) -> Network:
    """Parse one graph, or `model` in its place."""
    manifest = load_bundle(bundle).manifest
    plan = plan_of(manifest)
    made = Network(trt, graph)
    model = model or lower(stored(bundle, graph), plan.signatures[graph], plan.capacities)
    expected = changes.get("expected", expected_layers(graph, plan.target, plan.drafter))
    made.parse(model, Path(manifest.weights.root or bundle), plan.signatures[graph], plan.dtype, expected)
    return made


def stored(bundle: Path, graph: str) -> onnx.ModelProto:
    return onnx.load(bundle / f"{graph}.onnx", load_external_data=False)


LAYERS = {"context": 4, "draft": 6, "draft_sampled": 6}


def test_the_example_pair(pair_bundle: Path, tmp_path: Path) -> None:
    """All eight graphs, both devices. Layers, shapes and dtypes are checked by the builder itself; see test_counts_can_fail."""
    records = build(pair_bundle, tmp_path / "engines")
    assert list(records) == ["tensorrt-rtx-sm89", "tensorrt-rtx-sm120"]
    for name, record in records.items():
        assert {graph: engine.plugin_layers for graph, engine in record.graphs.items()} == dict.fromkeys(GRAPHS, 0) | LAYERS
        for graph in GRAPHS:
            assert (tmp_path / "engines" / engine_path(name, graph)).stat().st_size > 1000


@pytest.mark.parametrize(("dtype", "capability"), [("fp16", "12.0"), ("bf16", "8.9")])
def test_half_precision(export: Export, small_pair: Path, tmp_path: Path, dtype: str, capability: str) -> None:
    """The graphs that differ by dtype; the others compute in float32 whatever the models do. Everything, on both devices, is slow."""
    bundle = export(small_pair, dtype=dtype, ctx_window=32, max_chunk=64, max_batch_size=4)
    records = build(bundle, tmp_path / "engines", (capability,), graphs=(CONTEXT, DRAFT, DRAFT_SAMPLED, TARGET))
    ((_, record),) = records.items()
    assert {graph: engine.plugin_layers for graph, engine in record.graphs.items()} == LAYERS | {TARGET: 0}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("pair", [PAIR, *(GOLDEN / name for name in PAIRS)], ids=lambda path: path.name)
def test_every_pair(export: Export, tmp_path: Path, pair: Path, dtype: str) -> None:
    """Every Markov head, tied weights, biases, no confidence head; every graph, dtype and device."""
    records = build(export(pair, dtype=dtype), tmp_path / "engines")
    assert all(set(record.graphs) == set(GRAPHS) for record in records.values())


@pytest.mark.parametrize("pair", ["rnn", "tied_mqa_bias"])
def test_golden_pairs(export: Export, tmp_path: Path, pair: str) -> None:
    """A stateful Markov head; one key/value head, tied weights and biases."""
    assert build(export(GOLDEN / pair, ctx_window="full"), tmp_path / "engines", ("12.0",), graphs=(CONTEXT, DRAFT, TARGET))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_published_8b_widths(export: Export, tmp_path: Path, dtype: str) -> None:
    """The widths of the published 8B drafter, one layer of it, a vocabulary of 16384: the builder's memory is the limit."""
    shape = replace(SHAPES["8b"], layers=6, taps=(0, 1, 2, 3, 4), drafter_layers=1, vocabulary=16384, mask=16383)
    write_pair(tmp_path / "pair", shape, dtype=dtype, sparse=True)
    bundle = export(tmp_path / "pair", dtype=dtype, max_seq_len=4096)
    records = build(bundle, tmp_path / "engines", ("8.9",), graphs=(CONTEXT, DRAFT, DRAFT_SAMPLED))
    assert records["tensorrt-rtx-sm89"].graphs[DRAFT].plugin_layers == 3


def test_layers_of_the_target(pair_bundle: Path) -> None:
    """Caches are written by TensorRT's cache update and read by its fused attention, on key lengths: nothing reads a mask."""
    found = network(pair_bundle, TARGET).layers()
    assert found["KV_CACHE_UPDATE"] == 16
    assert found["ATTENTION_OUTPUT"] == 8


def test_counts_can_fail(pair_bundle: Path) -> None:
    with pytest.raises(EngineError, match=r"(?s)misreads graph draft.*4 layers of kind RingWrite, expected 5"):
        network(pair_bundle, DRAFT, expected={"RingWrite": 5, "BlockAttention": 2})


def test_fused_attention_is_not_on_a_dropped_input(pair_bundle: Path) -> None:
    """Attention-24's lengths are dropped in silence by the parser: such a graph never reaches it."""
    signature = plan_of(load_bundle(pair_bundle).manifest).signatures[TARGET]
    model = stored(pair_bundle, TARGET)
    node = next(n for n in model.graph.node if n.op_type == "CachedAttention")
    query, keys, values, start, _ = node.input
    node.CopyFrom(onnx.helper.make_node("Attention", [query, keys, values, "", "", "", start], list(node.output), is_causal=1))
    with pytest.raises(AssertionError, match="nonpad_kv_seqlen"):
        lower(model, signature, {"R": 1072, "S": 1072})


def change(model: onnx.ModelProto, operator: str, attribute: str, value: object) -> onnx.ModelProto:
    """Set (or, with None, drop) an attribute of the first node of an operator."""
    node = next(n for n in model.graph.node if n.op_type == operator)
    kept = [a for a in node.attribute if a.name != attribute]
    del node.attribute[:]
    node.attribute.extend(kept)
    if value is not None:
        node.attribute.append(onnx.helper.make_attribute(attribute, value))
    return model


@pytest.mark.parametrize(
    ("operator", "attribute", "value", "message"),
    [
        ("RingWrite", "plugin_namespace", "dsparc", "has plugin_namespace 'dsparc', expected 'dspark'"),
        ("RingWrite", "plugin_version", "2", "has plugin_version '2', expected '1'"),
        ("BlockAttention", "plugin_namespace", None, "has plugin_namespace '', expected 'dspark'"),
        ("BlockAttention", "scale", 1, "has scale 1, expected float"),
        ("BlockAttention", "window", 32.0, "has window 32.0, expected int"),
        ("BlockAttention", "heads", None, "has heads None, expected int"),
    ],
)
def test_nodes_that_are_refused(pair_bundle: Path, operator: str, attribute: str, value: object, message: str) -> None:
    """By us, before the parser, which would run a node of another namespace without its plugin if it still had its function."""
    signature = plan_of(load_bundle(pair_bundle).manifest).signatures[DRAFT]
    model = change(stored(pair_bundle, DRAFT), operator, attribute, value)
    with pytest.raises(ExportError, match=f"(?s)export it again.*{operator}.*{message}"):
        lower(model, signature, {"R": 1072, "S": 1072})


@pytest.mark.parametrize(
    ("operator", "attribute", "value", "message"),
    [
        ("RingWrite", "plugin_version", "2", "Plugin not found"),
        ("BlockAttention", "scale", 1, r"attribute scale is 1 \(int\), expected float"),
        ("BlockAttention", "heads", 8, "attribute heads is 8, the inputs have Hq = 4"),
    ],
)
def test_the_parser_refuses_them_too(pair_bundle: Path, operator: str, attribute: str, value: object, message: str) -> None:
    """Where a node reaches TensorRT all the same, the message is that of the parser or of our plugin, never silence."""
    plan = plan_of(load_bundle(pair_bundle).manifest)
    model = change(lower(stored(pair_bundle, DRAFT), plan.signatures[DRAFT], plan.capacities), operator, attribute, value)
    with pytest.raises(EngineError, match=f"(?s)does not parse graph draft.*{message}"):
        network(pair_bundle, DRAFT, model)


def test_plugins_that_are_not_registered(pair_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register(trt)
    (creator,) = [c for c in registry._registered["tensorrt_rtx"] if c.name == "BlockAttention"]
    assert trt.get_plugin_registry().deregister_creator(creator)
    try:
        with pytest.raises(EngineError, match=r"(?s)dspark::BlockAttention version 1 not registered.*registered are .*RingWrite") as error:
            network(pair_bundle, DRAFT)
        assert isinstance(error.value.__cause__, PluginError)
        assert "call dspark.plugins.registry.register first" in str(error.value)
    finally:
        assert trt.get_plugin_registry().register_creator(creator, registry.NAMESPACE)
    network(pair_bundle, DRAFT)


def test_a_missing_module_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(EngineError, match=r'tensorrt-rtx needs the module tensorrt_rtx.*pip install "dspark\[tensorrt-rtx\]"'):
        load_module("tensorrt-rtx")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(EngineError, match=r'tensorrt needs the module tensorrt .*pip install "dspark\[tensorrt\]"'):
        load_module("tensorrt")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shapes": (("maxShapes", {"anchor": (16,)}),)}, ConfigError, "draft: B may be 16, the bundle allows 8.*--max-batch-size"),
        ({"shapes": (("minShapes", {"anchor": (4,)}), ("maxShapes", {"anchor": (2,)}))}, ConfigError, "draft: B has minimum 4"),
        ({"capabilities": ("9.0",)}, EngineError, "has no ComputeCapability SM90; it has .*SM89"),
        ({"timing_cache": Path("timings")}, EngineError, "--timingCacheFile does nothing with tensorrt-rtx"),
        ({"version_compatible": True}, EngineError, "--versionCompatible needs the lean runtime"),
        ({"strip_weights": True}, EngineError, "ask for a CUDA device, and there is none here"),
        ({"capabilities": ()}, EngineError, "no CUDA device here to build for: pass --compute-capability"),
    ],
)
def test_builds_that_are_refused(
    pair_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type, message: str
) -> None:
    monkeypatch.setattr("dspark.export.build.device_capability", lambda: None)
    with pytest.raises(error, match=f"(?s){message}"):
        build(pair_bundle, tmp_path / "engines", **options)
    assert not (tmp_path / "engines" / "engines").exists()


def test_heads_without_kernels_are_refused(export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "HEAD_DIMS", kernels.HEAD_DIMS[1:])
    with pytest.raises(EngineError, match="head_dim is 16, for which there are no kernels: expected one of 64"):
        build(export(GOLDEN / "rnn", ctx_window="full"), tmp_path / "engines")


@pytest.mark.parametrize(
    ("text", "size"), [("workspace:64", 64 << 20), ("workspace:2G", 2 << 30), ("workspace:512k", 512 << 10), ("workspace:100B", 100)]
)
def test_pool_sizes(text: str, size: int) -> None:
    assert parse_pools(text) == size


@pytest.mark.parametrize("text", ["64", "dlaSRAM:4", "workspace:", "workspace:-1", "workspace:0", "workspace:1T"])
def test_pool_sizes_that_are_refused(text: str) -> None:
    with pytest.raises(EngineError, match="expected workspace:SIZE"):
        parse_pools(text)


def test_capabilities() -> None:
    assert parse_capabilities("8.9,12.0,8.9") == CAPABILITIES
    for text in ("", "89", "8.9,", "8.9;12.0", "sm_89"):
        with pytest.raises(EngineError, match=r"expected such as 8\.9 or 12\.0"):
            parse_capabilities(text)


PAIR_PATHS = [str(PAIR / model) for model in ("target", "drafter")]
ENGINES = ["--backend", FLAVOUR, "--compute-capability", "8.9"]


@pytest.fixture(scope="module")
def with_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example pair exported with engines by the command line, every option given."""
    output = tmp_path_factory.mktemp("cli") / "bundle"
    options = ["--maxShapes", "tokens:2x8,anchor:2", "--memPoolSize", "workspace:512", "--builderOptimizationLevel", "1"]
    options += [
        "--hardwareCompatibilityLevel",
        "ampere_plus",
        "--max-batch-size",
        "4",
        "--max-seq-len",
        "1024",
        "-q",
    ]
    assert cli.main([*PAIR_PATHS, str(output), *ENGINES, *options]) == 0
    return output


def test_the_command_line(with_engines: Path) -> None:
    """Engines are files of the bundle like others; the manifest says by what and for what they were made. dtype auto: the checkpoint's."""
    bundle = load_bundle(with_engines)
    (name,) = bundle.manifest.engines
    record = bundle.manifest.engines[name]
    assert bundle.manifest.dtype == "bf16"
    assert (name, record.flavour, record.version, record.compute_capability) == ("tensorrt-rtx-sm89", FLAVOUR, trt.__version__, "8.9")
    assert (record.ring_capacity, record.cache_capacity) == (bundle.manifest.ring_capacity, bundle.manifest.cache_capacity)
    assert (record.weights_stripped, record.version_compatible, record.hardware_compatibility) == (False, False, "ampere_plus")
    assert record.graphs[TARGET].profiles[1].maximum == {"B": 2, "N": 8, "M": 8}
    assert record.graphs[ACCEPT].profiles[0].maximum == {"B": 4, "M": 8}
    for graph in GRAPHS:
        assert bundle.engine_path(name, graph).is_file()
    assert sorted(path.name for path in with_engines.parent.iterdir()) == ["bundle"]


@pytest.fixture
def copy(with_engines: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(with_engines, tmp_path / "bundle"))


def test_a_damaged_engine_is_refused(copy: Path) -> None:
    path = copy / engine_path("tensorrt-rtx-sm89", DRAFT)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(BundleError, match=rf"draft\.engine has {len(whole) - 100} bytes, expected {len(whole)}"):
        load_bundle(copy)
    path.write_bytes((copy / "draft.onnx").read_bytes().ljust(len(whole), b"\0")[: len(whole)])
    with pytest.raises(BundleError, match=r"draft\.engine has changed"):
        load_bundle(copy)
    path.unlink()
    with pytest.raises(BundleError, match=r"draft\.engine is missing"):
        load_bundle(copy)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("flavour", "tensorrt", "says flavour tensorrt, compute capability 8.9: another name"),
        ("flavour", "openvino", "flavour is 'openvino', expected one of tensorrt, tensorrt-rtx"),
        ("compute_capability", "12.0", "compute capability 12.0: another name"),
        ("ring_capacity", 64, "was built for capacities 64 and .*build it again"),
        ("graphs", {}, "graphs are , expected context"),
        ("version", 1, "version is 1, expected str"),
    ],
)
def test_an_altered_manifest_is_refused(copy: Path, key: str, value: object, message: str) -> None:
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["engines"]["tensorrt-rtx-sm89"][key] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=message):
        load_bundle(copy)


def test_a_profile_in_the_manifest_that_contradicts_itself(copy: Path) -> None:
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["engines"]["tensorrt-rtx-sm89"]["graphs"][DRAFT]["profiles"][0]["minimum"]["B"] = 9
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"graphs\.draft: profile decode contradicts itself"):
        load_bundle(copy)


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> Any:
        raise EngineError("the builder gave up")

    monkeypatch.setattr(EngineBuilder, "_build_graph", fail)
    assert cli.main([*PAIR_PATHS, str(tmp_path / "out"), *ENGINES, "-q"]) == 2
    assert "the builder gave up" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strip-weights", "--maxShapes", "tokens:1x1"], "--maxShapes, --strip-weights are about engines: add --backend"),
        ([*ENGINES, "--verify"], "--verify runs on the CPU"),
        ([*ENGINES, "--minShapes", "tokens"], "'tokens' is no shape"),
        ([*ENGINES, "--maxShapes", "tokens:99x8"], "B may be 99, the bundle allows 8"),
        (["--backend", FLAVOUR, "--compute-capability", "9"], "compute capability '9': expected such as 8.9"),
    ],
)
def test_arguments_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert cli.main([*PAIR_PATHS, str(tmp_path / "out"), "-q", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_process_with_nothing_set_up(with_engines: Path) -> None:
    """The wheel's parser looks for a library by a name that the wheel does not have, and ends the process: found in a fresh one."""
    code = "import sys; from pathlib import Path; import test_tensorrt as t; t.network(Path(sys.argv[1]), 'draft')"
    environment = {"PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path])}
    result = subprocess.run([sys.executable, "-c", code, str(with_engines)], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
