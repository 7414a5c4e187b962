"""The TensorRT engine on a fake device: the same outputs as on the CPU, what is enqueued, copied and captured, and what is refused."""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
from engines import Parts, decode, open_parts, request, start
from fake_cuda import FakeCuda
from fake_tensorrt import VERSION, FakeTensorRT, add_engines, rewrite

from dspark.export import verify_cli
from dspark.plugins import registry
from dspark.runtime import LLM, SamplingParams, tensorrt
from dspark.runtime.backend import BACKENDS, open_engine
from dspark.runtime.bundle import MANIFEST, load_bundle
from dspark.runtime.drafter import Drafter
from dspark.runtime.engines import choose_record, engine_path
from dspark.runtime.errors import BundleError, EngineError, LimitError
from dspark.runtime.graphs import ACCEPT, CONTEXT, DRAFT, TRUNCATE
from dspark.runtime.state import Slots
from dspark.runtime.target import Qwen3Target
from dspark.runtime.tensorrt import TensorRTEngine

PROMPTS = [[5, 6, 7, 8], list(range(40, 140)), [9] * 33, [250, 3]]


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def trt(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    fake = FakeTensorRT(cuda)
    monkeypatch.setattr(tensorrt, "load_module", lambda _flavour: fake)
    monkeypatch.setattr(tensorrt, "Cuda", lambda: cuda)
    monkeypatch.setattr(registry, "_registered", {})
    return fake


@pytest.fixture(scope="session")
def engines(small_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_engines(small_bundle, tmp_path_factory.mktemp("engines") / "bundle")


def parts_of(bundle: Path, slots: int = 4) -> Parts:
    engine, table = TensorRTEngine(load_bundle(bundle), "tensorrt-rtx"), Slots(slots)
    return Parts(engine, table, Qwen3Target(engine, table), Drafter(engine, table))  # type: ignore[arg-type]


@pytest.mark.usefixtures("trt")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_outputs_are_those_of_the_cpu(small_bundle: Path, engines: Path, temperature: float) -> None:
    """Several requests at once, long and short, with slots that are freed and used again; plain ones among them."""
    params = [SamplingParams(max_tokens=n, temperature=temperature, top_p=0.9, seed=n, ignore_eos=True) for n in (40, 9, 70, 23)]
    host, device = LLM(small_bundle, max_num_seqs=3, threads=1), LLM(engines, max_num_seqs=3, backend="tensorrt-rtx")
    for speculative in (True, False):
        expected = host.generate(PROMPTS, params, speculative=speculative)
        actual = device.generate(PROMPTS, params, speculative=speculative)
        assert [o.token_ids for o in actual] == [o.token_ids for o in expected]


@pytest.mark.usefixtures("trt")
def test_the_other_flavour(small_bundle: Path, tmp_path: Path) -> None:
    """Engines of regular TensorRT differ by their record only."""
    place, params = add_engines(small_bundle, tmp_path / "bundle", flavour="tensorrt"), SamplingParams(max_tokens=20, ignore_eos=True)
    expected = LLM(small_bundle, threads=1).generate(PROMPTS[:2], params)
    assert [o.token_ids for o in LLM(place, backend="tensorrt").generate(PROMPTS[:2], params)] == [o.token_ids for o in expected]


@pytest.mark.usefixtures("trt")
def test_state_is_that_of_the_cpu(small_bundle: Path, engines: Path) -> None:
    """Rings and caches after prompts and rounds, and the logits of the last."""
    host, device = open_parts(small_bundle, slots=2), parts_of(engines, slots=2)
    for parts in (host, device):
        decoder, requests = parts.decoder(), [request(PROMPTS[1], 60, name="a"), request(PROMPTS[0], 60, name="b")]
        start(decoder, *requests)
        for _ in range(4):
            decoder.round(requests)
    assert host.drafter.total("a") == device.drafter.total("a")
    for kind, state, other in (("ring", host.drafter.rings, device.drafter.rings), ("cache", host.target.caches, device.target.caches)):
        view = host.slots.view(["a", "b"])
        theirs = other.tensors(view)
        for name, tensor in state.tensors(view).items():
            rows = tensor.shape[2] if kind == "ring" else host.target.length("b")
            np.testing.assert_allclose(theirs[name].read()[:, :, :rows], tensor.read()[:, :, :rows], atol=2e-5, err_msg=name)


def test_a_round_is_three_launches_and_one_copy_back(cuda: FakeCuda, trt: FakeTensorRT, engines: Path) -> None:
    """Once captured, nothing is enqueued one by one; the width and the sampling change neither number."""
    decoder = parts_of(engines).decoder()
    greedy = [request(PROMPTS[0], 200, name="a"), request(PROMPTS[1], 200, name="b")]
    start(decoder, *greedy)
    for width in (None, 4):
        for _ in range(3):
            decoder.round(greedy, width)
        cuda.calls.clear()
        decoder.round(greedy, width)
        assert (cuda.calls["launch"], cuda.calls["copy_out"], cuda.calls["synchronize"]) == (3, 1, 1)
        assert cuda.calls["copy_rows"] == (width is not None), "a narrow round takes the drafter's tokens on the device"
        assert not any(name.startswith("execute") or name in ("allocate", "begin_capture") for name in cuda.calls)
    sampled = [request(PROMPTS[2], 200, name="c", temperature=0.7, top_k=9, seed=3)]
    start(decoder, *sampled)
    for _ in range(3):
        decoder.round(sampled)
    cuda.calls.clear()
    decoder.round(sampled)
    assert (cuda.calls["launch"], cuda.calls["copy_out"], cuda.calls["synchronize"]) == (4, 1, 1)  # truncate is the fourth


def test_prompts_stay_on_the_device(cuda: FakeCuda, trt: FakeTensorRT, engines: Path) -> None:
    """Taps go from the target to the rings in the engine, chunk by chunk, as long as a chunk is no longer than the window."""
    decoder = parts_of(engines).decoder()
    one = request(PROMPTS[1], 200, name="a")
    decoder.admit(one)
    cuda.calls.clear()
    for end in (30, 60, 90, 100):
        decoder.prefill(one, end)
    assert cuda.calls["copy_out"] == 1, "the first token"


def test_steps_are_captured_again_for_other_addresses(cuda: FakeCuda, trt: FakeTensorRT, engines: Path) -> None:
    """Each bucket of rows, and each tensor that a step is bound to, has a graph of its own; all give right values."""
    engine = TensorRTEngine(load_bundle(engines), "tensorrt-rtx")
    vocabulary = engine.manifest.drafter.vocab_size
    steps = []
    for batch in (1, 3, 3):
        tensors = {
            "logits": engine.allocate((batch, 2, vocabulary), "float32"),
            **{name: engine.allocate(shape, "int64") for name, shape in (("verify_tokens", (batch, 8)), ("count", (batch,)))},
            **{name: engine.allocate((batch,), "int64") for name in ("accepted", "next_token")},
        }
        steps.append((engine.bind(ACCEPT, tensors), tensors))
    for turn in range(5):
        for number, (step, tensors) in enumerate(steps):
            batch = tensors["count"].shape[0]
            chosen = (np.arange(batch) * 7 + turn + number) % vocabulary
            logits = np.zeros((batch, 2, vocabulary), np.float32)
            logits[np.arange(batch), 0, chosen] = 1
            tensors["logits"].write(logits)
            step.run()
        for number, (_, tensors) in enumerate(steps):
            batch = tensors["count"].shape[0]
            np.testing.assert_array_equal(tensors["next_token"].read(), (np.arange(batch) * 7 + turn + number) % vocabulary)
    assert cuda.calls["begin_capture"] == 3 and cuda.calls["launch"] == 9
    assert trt.contexts == 4, "one for all steps that are not captured, one for each that is"


@pytest.mark.parametrize("at", ["end_capture", "enqueue"])
def test_an_engine_runs_where_nothing_can_be_captured(
    cuda: FakeCuda, trt: FakeTensorRT, small_bundle: Path, engines: Path, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    """CUDA refuses the recording, or TensorRT does not enqueue while it goes on: nothing of what was recorded is ever replayed."""
    if at == "end_capture":
        cuda.fail.add(at)
    trt.refuse = "capture" if at == "enqueue" else ""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = LLM(small_bundle, threads=1).generate([PROMPTS[0]], params)[0].token_ids
    llm = LLM(engines, backend="tensorrt-rtx")
    assert llm.generate([PROMPTS[0]], params)[0].token_ids == expected
    messages = [record.message for record in caplog.records if "without CUDA graph" in record.message]
    assert len(messages) == 3, "said once for each graph"
    assert ("end_capture failed" if at == "end_capture" else "the plugin failed") in messages[0]
    assert not cuda.calls["launch"]


def test_chunks_of_prompts_are_not_captured(cuda: FakeCuda, trt: FakeTensorRT, engines: Path) -> None:
    """Their contexts and graphs would be thrown away with the next length."""
    parts = parts_of(engines)
    parts.slots.admit("r")
    for _ in range(4):
        parts.target.prefill("r", list(range(30)))
    assert cuda.calls["execute target"] == 4 and not cuda.calls["begin_capture"]


def test_what_is_dropped_stays_until_the_stream_has_caught_up(cuda: FakeCuda, trt: FakeTensorRT, engines: Path) -> None:
    """Memory, contexts and graphs of a step that nothing refers to, while its work is still enqueued, or another one is captured."""
    engine = TensorRTEngine(load_bundle(engines), "tensorrt-rtx")
    vocabulary = engine.manifest.drafter.vocab_size
    shapes = {"logits": (4, 8, vocabulary), "threshold": (4, 8), "temperature": (4,), "top_k": (4,), "top_p": (4,), "min_p": (4,)}
    tensors = {name: engine.allocate(shape, "int64" if name == "top_k" else "float32") for name, shape in shapes.items()}
    step = engine.bind(TRUNCATE, tensors)
    for _ in range(3):
        step.run()
    held = weakref.ref(step._captured)
    before = cuda.calls["free"]
    cuda.begin_capture(77)
    del step, tensors
    gc.collect()
    cuda.end_capture(77)
    assert cuda.calls["free"] == before and held() is not None
    engine.allocate((1,), "int64").read()
    assert cuda.calls["free"] == before + 1 and held() is None, "the logits, which lie alone"


@pytest.mark.usefixtures("trt")
def test_sizes_outside_the_profiles(engines: Path, small_bundle: Path, tmp_path: Path) -> None:
    """Nothing is enqueued for a batch above the profile, nor for a state of another capacity."""
    record = load_bundle(engines).manifest.engines["tensorrt-rtx-sm89"]
    decode_profile = record.graphs[ACCEPT].profiles[0]
    narrow = dataclasses.replace(decode_profile, maximum=decode_profile.maximum | {"B": 2}, optimum=decode_profile.optimum | {"B": 1})
    graphs = record.graphs | {ACCEPT: dataclasses.replace(record.graphs[ACCEPT], profiles=(narrow,))}
    engine = TensorRTEngine(load_bundle(add_engines(small_bundle, tmp_path / "narrow", graphs=graphs)), "tensorrt-rtx")
    shapes = {"logits": (3, 1, 320), "verify_tokens": (3, 8), "count": (3,), "accepted": (3,), "next_token": (3,)}
    tensors = {name: engine.allocate(shape, "float32" if name == "logits" else "int64") for name, shape in shapes.items()}
    with pytest.raises(LimitError, match=r"graph accept of tensorrt-rtx-sm89: .*\n.*profile decode: B = 3, the engine was built for 1..2"):
        engine.bind(ACCEPT, tensors)
    ring = {f"{part}_ring.{layer}": engine.allocate((1, 2, 32, 16), "model") for part in ("key", "value") for layer in range(2)}
    taps = {"taps": engine.allocate((1, 4, engine.manifest.drafter.taps_width), "model"), "start": engine.allocate((1,), "int64")}
    with pytest.raises(LimitError, match="graph context of tensorrt-rtx-sm89 has fixed capacities: R = 32, built for 48"):
        engine.bind(CONTEXT, ring | taps)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("enqueue", "graph target: fake_tensorrt does not run it: enqueueV3: the plugin failed"),
        ("shape", r"graph target: fake_tensorrt refuses shape \[1, 4\] of tokens: it gave no reason"),
        ("address", "graph target: fake_tensorrt refuses the address of tokens"),
        ("profile", "graph target: fake_tensorrt makes no execution context"),
    ],
)
def test_refusals_of_a_context(trt: FakeTensorRT, engines: Path, refused: str, message: str) -> None:
    """Every status that TensorRT returns is looked at."""
    parts = parts_of(engines)
    parts.slots.admit("r")
    trt.refuse = refused
    with pytest.raises(EngineError, match=message):
        parts.target.prefill("r", PROMPTS[0])


def test_an_error_ends_its_requests_only(trt: FakeTensorRT, engines: Path) -> None:
    """A round that TensorRT does not run ends its requests; the next request is served."""
    decoder = parts_of(engines, slots=1).decoder()
    expected = [token for tokens in decode(decoder, request(PROMPTS[0], 12)) for token in tokens]
    failing = request(PROMPTS[0], 12, name="failing")
    decoder.add(failing)
    decoder.step()
    trt.refuse = "enqueue"
    trt.cuda.fail.add("launch")
    while failing.finish_reason is None:
        decoder.step()
    assert isinstance(failing.error, EngineError)
    trt.refuse = ""
    trt.cuda.fail.clear()
    assert [token for tokens in decode(decoder, request(PROMPTS[0], 12, name="next")) for token in tokens] == expected


@pytest.mark.usefixtures("trt")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "1.6.0"}, "engines/tensorrt-rtx-sm89 was built by tensorrt-rtx 1.6.0, installed is 1.7.1: export again here"),
        ({"weights_stripped": True}, "was built with --strip-weights and holds no weights: export again without it"),
        ({"compute_capability": "12.0"}, "no engines of tensorrt-rtx for compute capability 8.9, it has tensorrt-rtx-sm120: export again"),
        ({"flavour": "tensorrt"}, "no engines of tensorrt-rtx for compute capability 8.9, it has tensorrt-sm89"),
    ],
)
def test_engines_of_others_are_refused(small_bundle: Path, tmp_path: Path, changes: dict[str, object], message: str) -> None:
    bundle = load_bundle(add_engines(small_bundle, tmp_path / "bundle", **changes))
    with pytest.raises(EngineError, match=message):
        TensorRTEngine(bundle, "tensorrt-rtx")


@pytest.mark.usefixtures("trt")
def test_engines_that_others_may_use(small_bundle: Path, engines: Path, tmp_path: Path) -> None:
    """Version-compatible engines load in another version, hardware-compatible ones on another device."""
    place = add_engines(small_bundle, tmp_path / "version", version="1.6.0", version_compatible=True)
    engine = TensorRTEngine(load_bundle(place), "tensorrt-rtx")
    assert engine.record.version == "1.6.0" and engine._runtime.engine_host_code_allowed, "such an engine carries code"
    assert not TensorRTEngine(load_bundle(engines), "tensorrt-rtx")._runtime.engine_host_code_allowed
    bundle = load_bundle(add_engines(small_bundle, tmp_path / "device", "8.0", hardware_compatibility="ampere_plus"))
    assert choose_record(bundle.manifest.engines, "tensorrt-rtx", "9.0")[0] == "tensorrt-rtx-sm80"
    with pytest.raises(EngineError, match="no engines"):
        choose_record(bundle.manifest.engines, "tensorrt-rtx", "7.5")
    with pytest.raises(EngineError, match="it has none at all"):
        choose_record({}, "tensorrt-rtx", "8.9")


@pytest.mark.usefixtures("trt")
def test_files_that_are_no_engine(engines: Path, small_bundle: Path, tmp_path: Path) -> None:
    """What the bundle's hashes do not see, since someone wrote the manifest again: another graph's engine, an ONNX file, half a file."""
    place = add_engines(small_bundle, tmp_path / "bundle")
    engine = place / engine_path("tensorrt-rtx-sm89", DRAFT)
    whole = engine.read_bytes()
    cases = [
        (whole[: len(whole) // 2], r"fake_tensorrt 1.7.1 cannot load .*draft.engine: build the engines again:\n.*kSERIALIZATION_VERSION"),
        ((place / "draft.onnx").read_bytes(), "draft.engine is an ONNX file, expected an engine: build it with dspark-export --backend"),
        (whole.replace(b'"draft"', b'"context"'), r"not the engine of graph draft of this bundle(.|\n)*total is missing"),
        (whole.replace(b'"draft"', b'"target"'), r"(.|\n)*tokens is no tensor of this graph(.|\n)*2 profiles, the manifest has 1"),
    ]
    for data, message in cases:
        engine.write_bytes(data)
        with pytest.raises(BundleError, match=r"draft\.engine has"):
            load_bundle(place)
        rewrite(place)
        with pytest.raises(EngineError, match=message):
            TensorRTEngine(load_bundle(place), "tensorrt-rtx").load([DRAFT])


@pytest.mark.usefixtures("trt")
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("ops_contract", 99, "ops_contract is 99, this dspark has"), ("ring_capacity", 64, "ring_capacity is 64, expected 48")],
)
def test_manifests_that_were_altered(engines: Path, small_bundle: Path, tmp_path: Path, field: str, value: int, message: str) -> None:
    place = add_engines(small_bundle, tmp_path / "bundle")
    raw = json.loads((place / MANIFEST).read_text())
    (place / MANIFEST).write_text(json.dumps(raw | {field: value}))
    with pytest.raises(BundleError, match=message):
        LLM(place, backend="tensorrt-rtx")


def test_memory_is_checked_before_it_is_taken(cuda: FakeCuda, trt: FakeTensorRT, engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available_memory", lambda: 1000)
    with pytest.raises(EngineError, match=r"the (caches|rings) need .* GB for \d+ rows in 4 slots, 0.00 GB are available"):
        LLM(engines, backend="tensorrt-rtx")


def test_backends(small_bundle: Path) -> None:
    bundle = load_bundle(small_bundle)
    assert BACKENDS[0] == "onnxruntime" and open_engine(bundle).manifest is bundle.manifest
    with pytest.raises(EngineError, match="backend is 'cuda', expected one of onnxruntime, onnxruntime-cuda, tensorrt, tensorrt-rtx"):
        open_engine(bundle, "cuda")
    with pytest.raises(EngineError, match="threads and the cache of packed weights are for the backend onnxruntime, not for tensorrt"):
        open_engine(bundle, "tensorrt", threads=2)


@pytest.mark.usefixtures("trt")
def test_pending_rows_of_another_view(engines: Path, small_bundle: Path) -> None:
    """Taps that change their slot range, or wait while a request does not draft, pass through the host and come back."""
    outputs = []
    for parts in (parts_of(engines), open_parts(small_bundle)):
        decoder, one, two = parts.decoder(), request(PROMPTS[0], 90, name="a"), request(PROMPTS[2], 90, name="b")
        start(decoder, one, two)
        decoder.round([one, two])
        decoder.round([two])
        decoder.round([one], 1)
        decoder.round([one], 1)
        decoder.round([one, two])
        outputs.append((one.output, two.output))
    assert outputs[0] == outputs[1]


def test_the_engine_is_opened_by_name(trt: FakeTensorRT, engines: Path) -> None:
    engine = open_engine(load_bundle(engines), "tensorrt-rtx")
    assert isinstance(engine, TensorRTEngine) and trt.__version__ == VERSION
    assert engine.run_seconds >= 0 and isinstance(engine.fetch([engine.allocate((1,), "int64")])[0], np.ndarray)
    assert set(trt.creators) == {("RingWrite", "1", "dspark"), ("BlockAttention", "1", "dspark")}


@pytest.mark.usefixtures("trt")
def test_the_verification_of_engines(engines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dspark-verify` finds the engines of this device and compares their tensors, state and tokens."""
    assert verify_cli.main([str(engines), "--tokens", "12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["engines"]) == {"onnxruntime", "tensorrt-rtx"} and set(report["not_run"]) == {"onnxruntime-cuda"}
    names = {row["output"] for row in report["engines"]["tensorrt-rtx"]["tensors"]}
    assert {"logits", "taps", "verify_tokens", "key_ring.0.updated", "value_cache.5.updated"} <= names
