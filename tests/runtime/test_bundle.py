"""Loading bundles: a whole one loads, every damage is refused before anything runs. The graphs are arbitrary bytes here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL_DRAFTER, SMALL_TARGET

from dspark.plugins.contract import VERSION as OPS_CONTRACT
from dspark.runtime import bundle as bundle_module
from dspark.runtime.bundle import (
    FORMAT_VERSION,
    CheckpointRecord,
    Conventions,
    Fingerprint,
    Limits,
    Manifest,
    Weights,
    fingerprint,
    full_hash_faults,
    load_bundle,
    record_file,
    state_bytes,
)
from dspark.runtime.errors import BundleError
from dspark.runtime.graphs import GRAPHS

BAD = sorted((Path(__file__).parent.parent / "bad").glob("*.json"))
BAD_REASONS = {
    "list": ["has format version None"],
    "null": ["has format version None"],
    "not_a_number": ["rope_theta"],
    "other_version": ["has format version 5"],
    "overflowing_float": ["rope_theta"],
    "version_only": ["manifest.target is missing", "manifest.files is missing"],
    "wrong_shapes": ["manifest.target is", "manifest.files is", "manifest.weights is", "manifest.checkpoints.drafter is"],
    "wrong_types": ["window is '32'", "debug_outputs is 0", "opset is True", "max_chunk is 64.5", "target_layer_ids is '1,3,4'"],
}
"""What the message must say of a file in tests/bad; those not listed are no JSON."""

GRAPH_FILES = tuple(f"{name}.onnx" for name in GRAPHS)
WEIGHTS = "weights/model.safetensors"
DELETE = object()


def quantized(**changes: int | None) -> dict[str, int | None]:
    """Return what the manifest says of a quantised bundle."""
    return {"group_size": 32, "target_bits": 8, "drafter_bits": 4, "markov_bits": 8} | changes


def make_bundle(directory: Path, *, reference: Path | None = None) -> Manifest:
    """Write a bundle with its weights inside, or in `reference`/target/model.safetensors; return its manifest."""
    (directory / "weights").mkdir(parents=True)
    for name in GRAPH_FILES:
        (directory / name).write_bytes(name.encode() * 50)
    inside = GRAPH_FILES
    weights = Weights(None, {})
    if reference is None:
        inside = (*GRAPH_FILES, WEIGHTS)
        (directory / WEIGHTS).write_bytes(b"weights" * 100)
    else:
        file = reference / "target" / "model.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"weights" * 100)
        weights = Weights(str(reference), {"target/model.safetensors": fingerprint(file)})
    record = CheckpointRecord("0" * 64, {"model.safetensors": Fingerprint(700, "1" * 64)})
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        dspark_version="0.1.0",
        ops_contract=OPS_CONTRACT,
        opset=23,
        dtype="fp32",
        target=SMALL_TARGET,
        drafter=SMALL_DRAFTER,
        num_speculative_tokens=7,
        markov_topk=None,
        window=32,
        ring_capacity=48,
        cache_capacity=528,
        limits=Limits(max_batch_size=4, max_seq_len=512, max_chunk=64),
        conventions=Conventions(proposals=7, verify_width=8),
        debug_outputs=False,
        weights=weights,
        quantization=None,
        checkpoints={"target": record, "drafter": record},
        files={name: record_file(directory / name) for name in inside},
        engines={},
    )
    (directory / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def edit(directory: Path, changes: dict[tuple[str, ...] | str, Any]) -> None:
    """Set (or delete) keys of the manifest; a tuple is a path into it."""
    path = directory / "manifest.json"
    values = json.loads(path.read_text())
    for where, value in changes.items():
        *outer, key = (where,) if isinstance(where, str) else where
        place = values
        for step in outer:
            place = place[step]
        if value is DELETE:
            del place[key]
        else:
            place[key] = value
    path.write_text(json.dumps(values))


def refused(directory: Path) -> str:
    """Return the message with which the bundle is refused, which names the directory."""
    with pytest.raises(BundleError) as error:
        load_bundle(directory)
    assert str(directory) in str(error.value)
    return str(error.value)


def faults(directory: Path) -> list[str]:
    """Return the faults for which the bundle is refused."""
    return refused(directory).split("\n  - ")[1:]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A bundle with its weights inside."""
    make_bundle(tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def by_reference(tmp_path: Path) -> Path:
    """A bundle whose weights are tmp_path/models/target/model.safetensors."""
    make_bundle(tmp_path / "bundle", reference=tmp_path / "models")
    return tmp_path / "bundle"


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", [Path, str])
def test_whole_bundle_loads(tmp_path: Path, inside: bool, kind: type) -> None:
    directory = tmp_path / "bundle"
    manifest = make_bundle(directory, reference=None if inside else tmp_path / "models")
    bundle = load_bundle(kind(directory))
    assert bundle.manifest == manifest
    assert bundle.directory == directory
    assert bundle.graph_path("draft") == directory / "draft.onnx"


def test_manifest_is_deterministic_and_survives_a_round_trip(whole: Path) -> None:
    text = (whole / "manifest.json").read_text(encoding="utf-8")
    manifest = load_bundle(whole).manifest
    assert manifest.to_json() == text
    turned = {name: manifest.files[name] for name in reversed(manifest.files)}
    assert list(turned) != list(manifest.files)
    assert dataclasses.replace(manifest, files=turned).to_json() == text
    assert dataclasses.replace(manifest, window=33).to_json() != text


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "none"])
def test_other_pairs_survive_a_round_trip(tmp_path: Path, kind: str) -> None:
    manifest = make_bundle(tmp_path / "bundle")
    drafter = dataclasses.replace(SMALL_DRAFTER, markov_head_type=kind, target_layer_ids=(-1,), confidence_head_bias=False)
    manifest = dataclasses.replace(manifest, drafter=drafter, dtype="bf16", debug_outputs=True)
    (tmp_path / "bundle" / "manifest.json").write_text(manifest.to_json())
    assert load_bundle(tmp_path / "bundle").manifest == manifest


def test_whole_numbers_are_read_as_floats_where_floats_belong(whole: Path) -> None:
    edit(whole, {("target", "rope_theta"): 1000000})
    theta = load_bundle(whole).manifest.target.rope_theta
    assert (theta, type(theta)) == (1e6, float)


def test_state_bytes() -> None:
    manifest = Manifest(
        1,
        "",
        1,
        23,
        "fp32",
        SMALL_TARGET,
        SMALL_DRAFTER,
        7,
        None,
        32,
        48,
        528,
        Limits(4, 512, 64),
        Conventions(7, 8),
        False,
        Weights(None, {}),
        None,
        {},
        {},
        {},
    )
    assert state_bytes(manifest) == (2 * 2 * 2 * 48 * 16 * 4, 2 * 6 * 2 * 528 * 16 * 4)
    assert state_bytes(dataclasses.replace(manifest, dtype="bf16")) == (2 * 2 * 2 * 48 * 16 * 2, 2 * 6 * 2 * 528 * 16 * 2)


@pytest.mark.parametrize("place", ["nothing", "empty directory", "file"])
def test_no_bundle(tmp_path: Path, place: str) -> None:
    directory = tmp_path / "bundle"
    if place == "empty directory":
        directory.mkdir()
    if place == "file":
        directory.write_bytes(b"")
    assert str(directory / "manifest.json") in refused(directory)


def test_there_are_bad_manifests() -> None:
    assert len(BAD) >= 8


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_manifest_is_refused(whole: Path, path: Path) -> None:
    shutil.copy(path, whole / "manifest.json")
    message = refused(whole)
    assert all(part in message for part in BAD_REASONS.get(path.stem, ["manifest.json is not JSON"]))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe{\x00}\x00", b"\x00" * 100], ids=["empty", "utf-16", "zeros"])
def test_manifest_of_another_encoding(whole: Path, content: bytes) -> None:
    (whole / "manifest.json").write_bytes(content)
    assert "is not JSON" in refused(whole)


@pytest.mark.parametrize("version", [0, 3, 5, "4", None, [4], True, DELETE])
def test_other_format_version(whole: Path, version: object) -> None:
    edit(whole, {"format_version": version, "window": "wide", "new": 1})
    message = refused(whole)
    assert f"has format version {None if version is DELETE else version!r}, this dspark reads 4: export the bundle again" in message
    assert "window" not in message


def test_format_version_that_only_equals_4(whole: Path) -> None:
    edit(whole, {"format_version": 4.0})
    assert faults(whole) == ["manifest.format_version is 4.0, expected int"]


@pytest.mark.parametrize(
    "where",
    [
        *((field.name,) for field in dataclasses.fields(Manifest) if field.name != "format_version"),
        ("target", "tie_word_embeddings"),
        ("drafter", "confidence_head_bias"),
        ("limits", "max_chunk"),
        ("conventions", "taps"),
        ("weights", "root"),
        ("checkpoints", "target", "config_sha256"),
        ("checkpoints", "drafter", "files", "model.safetensors", "size"),
        ("files", "draft.onnx", "sha256"),
    ],
    ids=".".join,
)
def test_missing_key(whole: Path, where: tuple[str, ...]) -> None:
    edit(whole, {where: DELETE})
    assert faults(whole) == [f"manifest.{'.'.join(where)} is missing"]


@pytest.mark.parametrize("where", [("new",), ("target", "new"), ("limits", "new"), ("files", "draft.onnx", "new")], ids=".".join)
def test_unknown_key(whole: Path, where: tuple[str, ...]) -> None:
    edit(whole, {where: 1})
    assert faults(whole) == [f"manifest.{'.'.join(where)} is unknown"]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("window", "32"),
        ("window", 32.0),
        ("window", True),
        ("window", None),
        ("num_speculative_tokens", True),
        ("debug_outputs", 1),
        ("debug_outputs", "false"),
        ("dtype", 32),
        ("dtype", None),
        ("target", []),
        ("target", None),
        ("target.rope_theta", "1e6"),
        ("target.rope_theta", True),
        ("target.rope_theta", None),
        ("target.tie_word_embeddings", 0),
        ("drafter.target_layer_ids", 1),
        ("drafter.target_layer_ids", {"0": 1}),
        ("drafter.markov_head_type", None),
        ("limits", [4, 512, 64]),
        ("limits.max_batch_size", False),
        ("weights.root", 3),
        ("weights.root", False),
        ("weights.files", []),
        ("quantization", 8),
        ("markov_topk", "16"),
        ("checkpoints", "none"),
        ("checkpoints.target", None),
        ("checkpoints.target.files", None),
        ("files", None),
        ("files", ["draft.onnx"]),
    ],
)
def test_wrong_type(whole: Path, where: str, value: object) -> None:
    edit(whole, {tuple(where.split(".")): value})
    (fault,) = faults(whole)
    assert fault.startswith(f"manifest.{where} is {value!r}, expected ")


@pytest.mark.parametrize("item", ["1", 1.0, True, None, [1]])
def test_wrong_type_in_a_list(whole: Path, item: object) -> None:
    edit(whole, {("drafter", "target_layer_ids"): [1, item]})
    assert faults(whole) == [f"manifest.drafter.target_layer_ids[1] is {item!r}, expected int"]


def test_several_faults_in_one_error(whole: Path) -> None:
    edit(
        whole,
        {
            "window": "wide",
            "opset": DELETE,
            "new": 1,
            ("drafter", "block_size"): True,
            ("files", "draft.onnx"): 3,
            ("limits", "max_chunk"): DELETE,
        },
    )
    assert {fault.split()[0] for fault in faults(whole)} == {
        "manifest.window",
        "manifest.opset",
        "manifest.new",
        "manifest.drafter.block_size",
        "manifest.files.draft.onnx",
        "manifest.limits.max_chunk",
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ring_capacity": 47}, ["ring_capacity is 47, expected 48"]),
        ({"ring_capacity": 64}, ["ring_capacity is 64, expected 48"]),
        ({"cache_capacity": 512}, ["cache_capacity is 512, expected 528"]),
        ({"window": 4096}, ["ring_capacity is 48, expected 528"]),
        ({"window": 8, "ring_capacity": 16}, ["window is 8, expected at least 9 (block + 2)"]),
        ({"window": -5, "ring_capacity": 16}, ["window is -5, expected at least 9 (block + 2)"]),
        ({"dtype": "int8"}, ["dtype is 'int8', expected one of fp32, fp16, bf16"]),
        (
            {"ops_contract": OPS_CONTRACT + 1},
            [f"ops_contract is {OPS_CONTRACT + 1}, this dspark has {OPS_CONTRACT}: export again"],
        ),
        (
            {"num_speculative_tokens": 0, ("conventions", "proposals"): 0, ("conventions", "verify_width"): 1},
            ["num_speculative_tokens is 0, expected 1..7 (the block)"],
        ),
        (
            {
                "num_speculative_tokens": 8,
                ("conventions", "proposals"): 8,
                ("conventions", "verify_width"): 9,
                "cache_capacity": 528,
            },
            ["num_speculative_tokens is 8, expected 1..7 (the block)"],
        ),
        (
            {("conventions", "proposals"): 6},
            ["conventions say 6 proposals and verify width 8; num_speculative_tokens 7 means 7 and 8"],
        ),
        (
            {("conventions", "verify_width"): 7},
            ["conventions say 7 proposals and verify width 7; num_speculative_tokens 7 means 7 and 8"],
        ),
        (
            {"num_speculative_tokens": 6},
            ["conventions say 7 proposals and verify width 8; num_speculative_tokens 6 means 6 and 7"],
        ),
        ({("drafter", "mask_token_id"): 320}, ["mask_token_id 320 is outside the vocabulary"]),
        ({("drafter", "mask_token_id"): -1}, ["mask_token_id -1 is outside the vocabulary"]),
        ({("target", "vocab_size"): 300}, ["the vocabularies of target and drafter differ"]),
        ({("files", "draft.onnx"): DELETE}, ["files lacks draft.onnx"]),
        ({"files": {}}, [*(f"files lacks {name}" for name in GRAPH_FILES), f"files lacks {WEIGHTS}"]),
        ({("files", WEIGHTS): DELETE}, [f"files lacks {WEIGHTS}"]),
        ({"markov_topk": 0}, ["markov_topk is 0, expected null, or 1..320 where there is a Markov head"]),
        ({"markov_topk": 321}, ["markov_topk is 321, expected null, or 1..320 where there is a Markov head"]),
        ({"quantization": quantized(group_size=48)}, ["quantization.group_size is 48, expected one of (16, 32, 64, 128, 256)"]),
        ({"quantization": quantized(target_bits=2)}, ["quantization has bits (2, 4, 8), expected 4, 8 or null each"]),
        ({"quantization": quantized(markov_bits=4)}, ["quantization.markov_bits is 4, expected 8"]),
        ({"quantization": quantized(), "markov_topk": 16}, ["quantization.markov_bits is 8, expected None"]),
        ({"quantization": quantized(drafter_bits=None)}, ["quantization.markov_bits is 8, expected None"]),
        (
            {"quantization": quantized(target_bits=None, drafter_bits=None, markov_bits=None)},
            ["quantization has neither target_bits nor drafter_bits, expected null for a bundle that is not quantised"],
        ),
        ({"quantization": quantized(), "dtype": "fp16"}, ["dtype is 'fp16' and the weights are quantised, expected 'fp32'"]),
    ],
)
def test_values_that_do_not_fit(whole: Path, changes: dict[tuple[str, ...] | str, Any], expected: list[str]) -> None:
    edit(whole, changes)
    assert faults(whole) == expected


@pytest.mark.parametrize("limit", ["max_batch_size", "max_chunk", "max_seq_len"])
@pytest.mark.parametrize("value", [0, -1, -600])
def test_limits_below_1(whole: Path, limit: str, value: int) -> None:
    edit(whole, {("limits", limit): value})
    found = [fault for fault in faults(whole) if fault.startswith("limits are") and fault.endswith("expected at least 1 each")]
    assert len(found) == 1
    assert f"{limit}={value}" in found[0]


@pytest.mark.parametrize("changes", [{}, {"target_bits": None}, {"drafter_bits": None, "markov_bits": None}, {"group_size": 16}], ids=str)
def test_quantized_bundles_load(whole: Path, changes: dict[str, int | None]) -> None:
    edit(whole, {"quantization": quantized(**changes)})
    assert dataclasses.asdict(load_bundle(whole).manifest)["quantization"] == quantized(**changes)


def test_quantized_weights_lie_in_the_bundle(by_reference: Path) -> None:
    edit(by_reference, {"quantization": quantized()})
    assert faults(by_reference) == ["weights.root is set and the weights are quantised, expected null: they lie in the bundle"]


@pytest.mark.parametrize("key", ["group_size", "target_bits", "drafter_bits", "markov_bits"])
def test_incomplete_quantization(whole: Path, key: str) -> None:
    edit(whole, {"quantization": {k: v for k, v in quantized().items() if k != key}})
    assert faults(whole) == [f"manifest.quantization.{key} is missing"]


def test_several_values_in_one_error(whole: Path) -> None:
    edit(whole, {"ring_capacity": 1, "cache_capacity": 1, "dtype": "int8", "window": 2, ("files", "draft.onnx"): DELETE})
    assert [fault.split()[0] for fault in faults(whole)] == ["dtype", "window", "ring_capacity", "cache_capacity", "files"]


@pytest.mark.parametrize("window", [9, 512, 4096])
def test_windows_that_fit(whole: Path, window: int) -> None:
    edit(whole, {"window": window, "ring_capacity": 32 if window == 9 else 528})
    assert load_bundle(whole).manifest.window == window


@pytest.mark.parametrize("k", [1, 6])
def test_fewer_proposals_than_the_block(whole: Path, k: int) -> None:
    conventions = {("conventions", "proposals"): k, ("conventions", "verify_width"): k + 1}
    edit(whole, {"num_speculative_tokens": k, "cache_capacity": 528, **conventions})
    assert load_bundle(whole).manifest.num_speculative_tokens == k


@pytest.mark.parametrize("name", [*GRAPH_FILES, WEIGHTS])
@pytest.mark.parametrize("damage", ["missing", "directory", "shorter", "longer", "empty", "changed"])
def test_damaged_file(whole: Path, name: str, damage: str) -> None:
    path = whole / name
    content = path.read_bytes()
    size = len(content)
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage != "missing":
        cases = {"shorter": content[:-1], "longer": content + b"x", "empty": b"", "changed": content[:-1] + b"\0"}
        path.write_bytes(cases[damage])
    expected = {
        "missing": "is missing",
        "directory": "is missing",
        "shorter": f"has {size - 1} bytes, expected {size}",
        "longer": f"has {size + 1} bytes, expected {size}",
        "empty": f"has 0 bytes, expected {size}",
        "changed": "has changed: export the bundle again",
    }
    assert faults(whole) == [f"{name} {expected[damage]}"]


def test_all_damaged_files_in_one_error(by_reference: Path, tmp_path: Path) -> None:
    (by_reference / "context.onnx").unlink()
    (by_reference / "draft.onnx").write_bytes(b"x")
    (tmp_path / "models" / "target" / "model.safetensors").unlink()
    assert len(faults(by_reference)) == 3


@pytest.mark.parametrize("linked_to", ["inside", "outside"])
def test_link_in_place_of_a_graph(whole: Path, linked_to: str) -> None:
    other = whole / "other.onnx" if linked_to == "inside" else whole.parent / "other.onnx"
    (whole / "draft.onnx").rename(other)
    (whole / "draft.onnx").symlink_to(other)
    assert faults(whole) == ["draft.onnx is a link out of the bundle"]


def test_link_in_place_of_the_weights_folder(whole: Path) -> None:
    (whole / "weights").rename(whole.parent / "weights")
    (whole / "weights").symlink_to(whole.parent / "weights")
    assert faults(whole) == [f"{WEIGHTS} is a link out of the bundle"]


@pytest.mark.parametrize("name", ["../outside", "weights/../../outside", "weights/../draft.onnx", "ABSOLUTE", "", "..\\outside"])
@pytest.mark.parametrize("of", ["files", "weights"])
def test_path_that_leaves_its_folder(by_reference: Path, tmp_path: Path, name: str, of: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"outside")
    name = str(outside) if name == "ABSOLUTE" else name
    record = dataclasses.asdict(record_file(outside) if of == "files" else fingerprint(outside))
    edit(by_reference, {("files", name) if of == "files" else ("weights", "files", name): record})
    assert faults(by_reference) == [f"path {name!r} leaves its folder"]


def test_bundle_that_moved_still_loads(whole: Path, tmp_path: Path) -> None:
    before = load_bundle(whole).manifest
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    whole.rename(moved)
    assert load_bundle(moved).manifest == before
    link = tmp_path / "link"
    link.symlink_to(moved)
    assert load_bundle(link).manifest == before


def test_bundle_by_reference_moves_without_its_checkpoint(by_reference: Path, tmp_path: Path) -> None:
    before = load_bundle(by_reference).manifest
    by_reference.rename(tmp_path / "moved")
    assert load_bundle(tmp_path / "moved").manifest == before


def test_missing_checkpoint_file_says_what_to_do(by_reference: Path, tmp_path: Path) -> None:
    (tmp_path / "models").rename(tmp_path / "moved")
    path = tmp_path / "models" / "target" / "model.safetensors"
    assert faults(by_reference) == [f"checkpoint file {path} is missing: put it back, or export again with --copy-weights"]


@pytest.mark.parametrize("place", [0, 350, -1])
@pytest.mark.parametrize("same_size", [True, False])
def test_changed_checkpoint_file(by_reference: Path, tmp_path: Path, place: int, same_size: bool) -> None:
    path = tmp_path / "models" / "target" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content if same_size else content + b"x")
    (fault,) = faults(by_reference)
    assert fault == f"checkpoint file {path} is not the one the bundle was exported from: export again"


def test_touched_checkpoint_file_is_the_same(by_reference: Path, tmp_path: Path) -> None:
    path = tmp_path / "models" / "target" / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    load_bundle(by_reference)


def test_fingerprint_reads_five_samples(tmp_path: Path) -> None:
    sample, path = 1 << 16, tmp_path / "file"
    path.write_bytes(b"abc")
    assert fingerprint(path) == Fingerprint(3, hashlib.sha256(b"abc" * 5).hexdigest())
    content = bytes(range(256)) * 4096
    path.write_bytes(content)
    starts = [(len(content) - sample) * part // 4 for part in range(5)]
    expected = hashlib.sha256(b"".join(content[start : start + sample] for start in starts)).hexdigest()
    assert fingerprint(path) == Fingerprint(len(content), expected)


@pytest.mark.parametrize(("place", "seen"), [(0, True), (1 << 19, True), ((1 << 20) - 1, True), (100_000, False)])
def test_large_files_are_sampled_when_loading(whole: Path, monkeypatch: pytest.MonkeyPatch, place: int, seen: bool) -> None:
    monkeypatch.setattr(bundle_module, "_HASHED_AT_LOAD", 1 << 19)
    path = whole / WEIGHTS
    content = bytearray(1 << 20)
    path.write_bytes(content)
    edit(whole, {("files", WEIGHTS): dataclasses.asdict(record_file(path))})
    assert full_hash_faults(load_bundle(whole)) == []
    content[place] = 1
    path.write_bytes(content)
    if seen:
        assert faults(whole) == [f"{WEIGHTS} has changed: export the bundle again"]
    else:
        assert full_hash_faults(load_bundle(whole)) == [f"{WEIGHTS} has changed"]
