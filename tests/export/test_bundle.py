"""Exporting whole bundles: atomic, reproducible, movable or honest about it, by reference through links, at any size."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import GOLDEN, PAIR, ROOT, SMALL, Export
from random_pair import Shape, drafter_config, drafter_tensors, target_config, target_tensors, write_checkpoint, write_pair
from safetensors import safe_open
from safetensors.torch import save_file

from dspark.export import bundle as bundle_module
from dspark.export.bundle import ExportOptions, export_bundle
from dspark.export.pair import load_pair
from dspark.export.weights import Weights
from dspark.runtime import LLM, SamplingParams
from dspark.runtime.bundle import MANIFEST, WEIGHTS, load_bundle
from dspark.runtime.errors import BundleError, CheckpointError, ConfigError, EngineError, ExportError

OPTIONS = {"ctx_window": 32, "debug_outputs": True, "max_chunk": 64, "max_batch_size": 4}


def export_small(pair: Path, output: Path, **options: object) -> Path:
    export_bundle(pair / "target", pair / "drafter", output, ExportOptions(**(OPTIONS | options)))
    return output


def generate(bundle: Path, tokens: int = 12) -> list[int]:
    return LLM(bundle).generate([[5, 9, 250]], SamplingParams(max_tokens=tokens, ignore_eos=True))[0].token_ids


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_two_exports_are_byte_identical(tmp_path: Path, pair_bundle: Path) -> None:
    """Two processes, two output names, the same bytes in every file. Progress is one line on a terminal."""
    command = [sys.executable, "-m", "dspark.export.cli", str(PAIR / "target"), str(PAIR / "drafter")]
    controller, terminal = pty.openpty()
    process = subprocess.Popen([*command, str(tmp_path / "other")], stderr=terminal, stdout=subprocess.PIPE)
    os.close(terminal)
    shown = b""
    while chunk := _read(controller):
        shown += chunk
    printed, _ = process.communicate()
    assert process.returncode == 0
    assert b"7 proposals a round" in printed
    assert b"tracing the models" in shown
    assert shown.endswith(b"\x1b[K")
    assert contents(pair_bundle) == contents(tmp_path / "other")
    assert {MANIFEST, WEIGHTS} < contents(pair_bundle).keys()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the terminal was closed
        return b""


def test_a_bundle_with_its_weights_moves(small_pair: Path, small_bundle: Path, tmp_path: Path) -> None:
    copied = export_small(small_pair, tmp_path / "copied", copy_weights=True)
    moved = copied.rename(tmp_path / "moved")
    assert generate(moved) == generate(small_bundle)
    (moved / WEIGHTS).unlink()
    with pytest.raises(BundleError, match=r"weights/model\.safetensors is missing"):
        LLM(moved)


def test_by_reference_names_the_missing_checkpoint(small_pair: Path, tmp_path: Path) -> None:
    """Weights stay where they are; when they go, the message has the path and the remedy."""
    pair = tmp_path / "pair"
    shutil.copytree(small_pair, pair)
    bundle = export_small(pair, tmp_path / "bundle")
    assert not (bundle / "weights").exists()
    assert sum(path.stat().st_size for path in bundle.iterdir()) < 500_000
    moved = bundle.rename(tmp_path / "elsewhere")
    assert len(generate(moved)) == 12
    pair.rename(tmp_path / "gone")
    expected = f"checkpoint file {pair}/target/model.safetensors is missing.*--copy-weights"
    with pytest.raises(BundleError, match=f"(?s){expected}"):
        LLM(moved)
    (tmp_path / "gone").rename(pair)
    weights = pair / "target" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BundleError, match="is not the one the bundle was exported from"):
        LLM(moved)


def test_hugging_face_cache(small_bundle: Path, tmp_path: Path) -> None:
    """Snapshots of links into blobs, two repositories of one cache, the target in three shards: by reference, and it runs."""
    plain, hub = tmp_path / "plain", tmp_path / "hub"
    write_pair(plain, SMALL, dtype="fp32", deviation=0.15, shards=3)
    snapshots = {}
    for model in ("target", "drafter"):
        repository = hub / f"models--org--{model}"
        snapshots[model] = repository / "snapshots" / "0123abcd"
        snapshots[model].mkdir(parents=True)
        (repository / "blobs").mkdir()
        for number, file in enumerate(sorted((plain / model).iterdir())):
            blob = repository / "blobs" / f"{number:064x}"
            shutil.copyfile(file, blob)
            (snapshots[model] / file.name).symlink_to(Path("../../blobs") / blob.name)
    output = tmp_path / "bundle"
    export_bundle(snapshots["target"], snapshots["drafter"], output, ExportOptions(**OPTIONS))
    manifest = load_bundle(output).manifest
    assert manifest.weights.root == str(hub)
    assert len(manifest.weights.files) == 4
    assert all("/blobs/" in name for name in manifest.weights.files)
    assert len(generate(output)) == 12
    assert generate(output) == generate(export_small(plain, tmp_path / "again", copy_weights=True))


def test_tied_and_shared_weights_are_stored_once(tmp_path: Path) -> None:
    """A tied head is the embedding; a drafter's byte copies of the target's tables, and missing ones, are not stored again."""
    tied = replace(SMALL, tied=True)
    write_checkpoint(tmp_path / "target", target_config(tied), target_tensors(tied), dtype="bf16", seed=1)
    own = {name: size for name, size in drafter_tensors(tied).items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    write_checkpoint(tmp_path / "drafter", drafter_config(tied), own, dtype="bf16", seed=2)
    weights = Weights(load_pair(tmp_path / "target", tmp_path / "drafter"), "fp32", copy=False)
    assert weights.inside
    assert len([n for n, t in weights.tensors.items() if t.shape == (320, 64)]) == 1
    published = Weights(load_pair(PAIR / "target", PAIR / "drafter"), "fp32", copy=False)
    assert [n for n, t in published.tensors.items() if t.shape == (2048, 192)] == ["target.embed_tokens.weight"]


def test_converted_weights_are_exact(pair_bundle: Path) -> None:
    """bf16 to fp32 keeps every value; the file is a valid safetensors file."""
    with safe_open(pair_bundle / WEIGHTS, "numpy") as ours, safe_open(PAIR / "target" / "model.safetensors", "pt") as theirs:
        for name in ("model.layers.3.mlp.up_proj.weight", "model.norm.weight"):
            np.testing.assert_array_equal(ours.get_tensor(name.replace("model.", "target.")), theirs.get_tensor(name).float().numpy())


def test_float16_beyond_its_range_is_refused(tmp_path: Path) -> None:
    write_pair(tmp_path, SMALL, dtype="fp32", deviation=3e4)
    with pytest.raises(ExportError, match=r"holds values beyond float16's 65504: export with --dtype fp32 or bf16"):
        export_small(tmp_path, tmp_path / "bundle", dtype="fp16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter", "target"]


def test_bf16_is_refused_on_the_cpu(tmp_path: Path) -> None:
    """Case G2: at load, with the remedy, not an obscure kernel error. The weights are those of the checkpoint, referred to or copied."""
    write_pair(tmp_path, SMALL)
    bundle = export_small(tmp_path, tmp_path / "bundle", dtype="bf16")
    assert load_bundle(bundle).manifest.weights.root is not None
    with pytest.raises(EngineError, match=r"bf16 bundle.*no bf16 MatMul.*--dtype fp32"):
        LLM(bundle)
    copied = export_small(tmp_path, tmp_path / "copied", dtype="bf16", copy_weights=True)
    with safe_open(copied / WEIGHTS, "pt") as ours, safe_open(tmp_path / "drafter" / "model.safetensors", "pt") as theirs:
        assert ours.get_tensor("drafter.fc.weight").equal(theirs.get_tensor("fc.weight"))


def test_a_small_weight_of_another_dtype_copies_nothing(tmp_path: Path) -> None:
    """A float32 norm in a bf16 checkpoint becomes data of the graph; the rest stays where it is."""
    write_pair(tmp_path, SMALL)
    target = tmp_path / "target" / "model.safetensors"
    with safe_open(target, "pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 0.25
    save_file(tensors, target)
    bundle = export_small(tmp_path, tmp_path / "bundle", dtype="bf16")
    assert load_bundle(bundle).manifest.weights.root == str(tmp_path)
    model = onnx.load(bundle / "target.onnx", load_external_data=False)
    inlined = {t.name: t for t in model.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL}
    assert inlined.keys() == {"target.norm.weight", "rotary.inv_freq"}
    values = onnx.numpy_helper.to_array(inlined["target.norm.weight"]).astype(np.float32)
    np.testing.assert_array_equal(values, tensors["model.norm.weight"].bfloat16().float().numpy())


def test_a_checkpoint_moved_behind_a_link_is_named(small_pair: Path, tmp_path: Path) -> None:
    """ONNX Runtime opens no weights through a link: said before it is asked."""
    pair = tmp_path / "pair"
    shutil.copytree(small_pair, pair)
    bundle = export_small(pair, tmp_path / "bundle")
    (pair / "target").rename(tmp_path / "moved")
    (pair / "target").symlink_to(tmp_path / "moved")
    with pytest.raises(BundleError, match=r"behind a link, which ONNX Runtime does not open"):
        LLM(bundle)


def test_an_existing_output_is_not_touched(small_bundle: Path, small_pair: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    for name, text in (("mine.txt", "keep"), ("manifest.json", '{"name": "a web app", "format_version": 1}')):
        (output / name).write_text(text)
        before = contents(output)
        for overwrite in (False, True):
            with pytest.raises(ExportError, match=r"is not empty and holds .* no part of a bundle"):
                export_small(small_pair, output, overwrite=overwrite)
        assert contents(output) == before
    bundle = tmp_path / "bundle"
    shutil.copytree(small_bundle, bundle)
    with pytest.raises(ExportError, match=r"already holds a bundle.*--overwrite"):
        export_small(small_pair, bundle)
    (bundle / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"holds notes\.txt, which is no part of a bundle"):
        export_small(small_pair, bundle, overwrite=True)
    (bundle / "notes.txt").unlink()
    export_small(small_pair, bundle, overwrite=True)
    assert contents(bundle) == contents(small_bundle)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ExportError, match="exists and is no directory"):
        export_small(small_pair, tmp_path / "file")


def test_a_failure_leaves_nothing(small_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle_module, "record_files", fail)
    with pytest.raises(OSError, match="No space left"):
        export_small(small_pair, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("after", "number", "code"),
    [
        ("tracing the models", signal.SIGINT, 130),
        pytest.param("checking the graphs", signal.SIGINT, 130, marks=pytest.mark.slow),
        ("checking the graphs", signal.SIGTERM, 143),
    ],
)
def test_interrupt_leaves_nothing(tmp_path: Path, after: str, number: int, code: int) -> None:
    """A signal at any time: its exit code within five seconds, nothing at the output or beside it."""
    pair = GOLDEN / "vanilla"
    command = [
        sys.executable,
        "-m",
        "dspark.export.cli",
        str(pair / "target"),
        str(pair / "drafter"),
        str(tmp_path / "out"),
        "-v",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if after in line:
            break
    process.send_signal(number)
    began = time.monotonic()
    rest = process.communicate(timeout=20)[1]
    assert process.returncode == code, rest
    assert time.monotonic() - began < 5
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens is 0, expected 1\.\.7"),
        ({"num_speculative_tokens": 8}, r"num_speculative_tokens is 8, expected 1\.\.7"),
        ({"ctx_window": 8}, r"the minimum is 9"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_seq_len": 513}, "max_seq_len is 513, the target's max_position_embeddings is 512"),
        ({"max_seq_len": 1}, "max_seq_len is 1"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"max_chunk": 0}, "max_chunk is 0"),
        ({"opset": 23}, "opset is 23"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"mask_token_id": 320}, "mask_token_id 320 is outside"),
        ({"max_chunk": 0, "opset": 26, "ctx_window": 1}, r"(?s)ctx_window is 1.*max_chunk is 0.*opset is 26"),
    ],
)
def test_refused_options(small_pair: Path, tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export_small(small_pair, tmp_path / "bundle", **options)
    assert list(tmp_path.iterdir()) == []


def test_damaged_checkpoints_are_named(small_pair: Path, tmp_path: Path) -> None:
    pair = tmp_path / "pair"
    shutil.copytree(small_pair, pair)
    weights = pair / "drafter" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=rf"{weights} is truncated"):
        export_small(pair, tmp_path / "bundle")
    data = bytearray(whole)
    data[-4:] = np.float32(np.nan).tobytes()
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"not-a-number entries: drafter\."):
        export_small(pair, tmp_path / "bundle", check_finite=True)
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        export_small(tmp_path / "nowhere", tmp_path / "bundle")


def test_the_newest_opset(export: Export) -> None:
    bundle = export(GOLDEN / "small_vocab", opset=25, copy_weights=True)
    (output,) = LLM(bundle).generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True))
    (plain,) = LLM(bundle).generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True), speculative=False)
    assert output.token_ids == plain.token_ids


def test_limits_and_sizes_are_recorded(small_bundle: Path, small_pair: Path, export: Export) -> None:
    manifest = load_bundle(small_bundle).manifest
    assert (manifest.window, manifest.ring_capacity, manifest.cache_capacity) == (32, 48, 528)
    assert manifest.conventions.verify_width == 8
    raw = json.loads((small_bundle / MANIFEST).read_text())
    assert raw["drafter"]["target_layer_ids"] == [1, 3, 4]
    full = load_bundle(export(small_pair, ctx_window="full", debug_outputs=True)).manifest
    assert (full.window, full.ring_capacity) == (512, 528)


@pytest.mark.slow
def test_weights_beyond_two_gigabytes(tmp_path: Path) -> None:
    """Protobuf holds 2 GB; 2.3 GB of weights lie beside a small graph, and the directory moves (case G1)."""
    shape = Shape(4096, 512, 2, 8, 4, 128, True, (0,), vocabulary=151936, drafter_layers=1, rank=8, positions=128)
    write_pair(tmp_path / "pair", shape, sparse=True)
    bundle = tmp_path / "bundle"
    export_bundle(tmp_path / "pair" / "target", tmp_path / "pair" / "drafter", bundle, ExportOptions(dtype="fp32"))
    assert all(path.stat().st_size < 10_000_000 for path in bundle.glob("*.onnx"))
    moved = bundle.rename(tmp_path / "moved")
    assert (moved / WEIGHTS).stat().st_size > 2_300_000_000
    assert len(generate(moved, 4)) == 4
    with (moved / WEIGHTS).open("r+b") as handle:
        handle.truncate(1_000_000_000)
    with pytest.raises(BundleError, match="1000000000 bytes, expected"):
        LLM(moved)


def measured(shape: str, dtype: str, directory: Path) -> tuple[float, float]:
    """Return peak GB and MB written by the benchmark's export of a shape.

    Run as a command of its own: a child's peak would otherwise begin at that of this process.
    """
    script = ROOT / "benchmarks" / "export_shapes.py"
    command = [sys.executable, str(script), shape, "--dtype", dtype, "--directory", str(directory)]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    cells = table.splitlines()[-1].strip("| ").split(" | ")
    assert cells[:2] == [shape, dtype]
    return float(cells[3]), float(cells[4])


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["4b", "8b", "14b"])
def test_published_shapes_export_by_reference(tmp_path: Path, shape: str) -> None:
    """Sparse files of the published sizes: little memory, little disk; the times are in the README."""
    memory, written = measured(shape, "bf16", tmp_path)
    assert memory < 2
    assert written < 20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "int8", "int4"])
def test_conversion_memory_does_not_grow_with_the_model(tmp_path: Path, dtype: str) -> None:
    """0.6B against 1.7B parameters, streamed: the same peak."""
    small, large = (measured(shape, dtype, tmp_path)[0] for shape in ("0.6b", "1.7b"))
    assert large < min(small + 0.2, 2)
