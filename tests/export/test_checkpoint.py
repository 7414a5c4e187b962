"""Safetensors files on disk: headers, shards, damage, and which tensors a model takes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from random_pair import write_checkpoint
from safetensors import safe_open

from dspark.export import checkpoint as checkpoint_module
from dspark.export.checkpoint import StoredTensor, open_checkpoint, read_header, select_tensors
from dspark.export.weights import check_finite, common_root
from dspark.runtime.errors import CheckpointError, ExportError

TENSORS = {"a.weight": (5, 7), "b.weight": (11,), "c.norm.weight": (3, 2, 4), "d.weight": (1,)}
HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


def file_bytes(header: bytes, data: bytes) -> bytes:
    """Return a safetensors file."""
    return struct.pack("<Q", len(header)) + header + data


def write_arrays(path: Path, arrays: dict[str, np.ndarray], names: dict[str, str] | None = None) -> Path:
    """Write arrays as a safetensors file; `names` gives dtypes that numpy's own do not tell."""
    kinds = {"<f4": "F32", "<f2": "F16", "<i8": "I64"} | (names or {})
    header, data = {}, b""
    for name, array in arrays.items():
        kind = kinds.get(name) or kinds[array.dtype.str]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file_bytes(json.dumps(header).encode(), data))
    return path


def stored(path: Path, array: np.ndarray) -> StoredTensor:
    """Return the only tensor of a file just written with `array`."""
    (tensor,) = read_header(write_arrays(path, {"x": array}))
    return tensor


def read(tensor: StoredTensor) -> bytes:
    """Return all bytes of a tensor."""
    return b"".join(chunk.tobytes() for chunk in tensor.chunks())


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", {}, TENSORS)
    whole = open_checkpoint(tmp_path / "one")
    assert whole.files == (tmp_path / "one" / "model.safetensors",)
    parts = [dict(list(TENSORS.items())[i::3]) for i in range(3)]
    names = [f"model-{i + 1:05d}-of-00003.safetensors" for i in range(3)]
    for name, part in zip(names, parts, strict=True):
        values = {n: np.frombuffer(read(whole.tensors[n]), np.uint16).reshape(TENSORS[n]) for n in part}
        write_arrays(tmp_path / "three" / name, values, dict.fromkeys(part, "BF16"))
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (tmp_path / "three" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = open_checkpoint(tmp_path / "three")
    assert sharded.files == tuple(tmp_path / "three" / name for name in names)
    assert sharded.tensors.keys() == whole.tensors.keys() == TENSORS.keys()
    for name, tensor in whole.tensors.items():
        other = sharded.tensors[name]
        assert (other.name, other.shape, other.dtype) == (name, TENSORS[name], "BF16")
        assert other.file.name == weight_map[name]
        assert tensor.same_content(other)
        assert read(tensor) == read(other)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("chunk", [1 << 22, 4])
def test_chunks_are_what_safetensors_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, shards: int, chunk: int) -> None:
    monkeypatch.setattr(checkpoint_module, "_CHUNK", chunk)
    write_checkpoint(tmp_path, {}, TENSORS, dtype=dtype, shards=shards)
    for name, tensor in open_checkpoint(tmp_path).tensors.items():
        with safe_open(tensor.file, framework="pt") as reference:
            expected = reference.get_tensor(name).float().numpy()
        pieces = list(tensor.chunks())
        assert len(pieces) == -(-expected.size // chunk)
        assert np.array_equal(np.concatenate([piece.astype(np.float32) for piece in pieces]).reshape(tensor.shape), expected)


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json") as error:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        file_bytes(HEADER, b"\0" * 7),
        file_bytes(HEADER, b""),
        file_bytes(HEADER, b"\0" * 9),
        file_bytes(HEADER, b"\0" * 8)[:20],
        b"",
        b"\x08\0\0\0",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 491\n",
        b"PK\x03\x04" + b"\0" * 100,
        file_bytes(b"x" * len(HEADER), b"\0" * 8),
        file_bytes(b"[1,2,3]", b""),
        file_bytes(b"\xff\xfe\xfd", b""),
        struct.pack("<Q", 1 << 63) + HEADER,
        struct.pack("<Q", 0) + HEADER,
        file_bytes(b'{"a":{"dtype":"F32","shape":[2]}}', b"\0" * 8),
        file_bytes(b'{"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}}', b"\0" * 8),
        file_bytes(b'{"a":[1,2]}', b""),
        file_bytes(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8]}}', b"\0" * 8),
        file_bytes(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4,8]}}', b"\0" * 8),
        file_bytes(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":["0","8"]}}', b"\0" * 8),
        file_bytes(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[-8,8]}}', b"\0" * 8),
        file_bytes(b'{"a":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}}', b"\0" * 8),
        file_bytes(b'{"a":{"dtype":' + b"[" * 100_000, b"\0" * 8),
    ],
    ids=[
        "a byte short",
        "no data",
        "a byte long",
        "cut in the header",
        "empty",
        "4 bytes",
        "git-lfs pointer",
        "pickle",
        "header not JSON",
        "header a list",
        "header not utf-8",
        "header length absurd",
        "header length 0",
        "no offsets",
        "shape no list",
        "entry a list",
        "one offset",
        "three offsets",
        "text offsets",
        "negative offset",
        "dtype no text",
        "header too deep",
    ],
)
def test_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    assert str(path) in str(error.value)


def test_whole_file_of_the_damage_tests_loads(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(file_bytes(HEADER, b"\0" * 8))
    (tensor,) = open_checkpoint(tmp_path).tensors.values()
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.length) == ("a", "F32", (2,), 8 + len(HEADER), 8)


@pytest.mark.parametrize("missing", [1, 2])
def test_missing_shards_are_named(tmp_path: Path, missing: int) -> None:
    write_checkpoint(tmp_path, {}, TENSORS, shards=3)
    gone = sorted(tmp_path.glob("model-*"))[:missing]
    for file in gone:
        file.unlink()
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    assert all(str(file) in str(error.value) for file in gone)
    assert "model-00003-of-00003" not in str(error.value)


def test_damaged_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, TENSORS, shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is truncated"):
        open_checkpoint(tmp_path)


def test_index_with_a_tensor_that_no_shard_holds(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, TENSORS, shards=3)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lost.weight"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lost\.weight") as error:
        open_checkpoint(tmp_path)
    assert str(path) in str(error.value)
    assert "a.weight" not in str(error.value)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 3}}', "[]", "{"])
def test_broken_index_is_named(tmp_path: Path, index: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    assert str(path) in str(error.value)


def test_select_returns_the_expected_tensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, TENSORS | {"model.rotary_emb.inv_freq": (4,), "old.weight": (2,)})
    checkpoint = open_checkpoint(tmp_path)
    selected = select_tensors(checkpoint, TENSORS, ignored=["old.weight", "absent.weight"])
    assert selected.keys() == TENSORS.keys()
    assert all(selected[name] is checkpoint.tensors[name] for name in TENSORS)


def test_all_tensor_faults_in_one_error(tmp_path: Path) -> None:
    arrays = {
        "good": np.zeros(3, np.float32),
        "misshaped": np.zeros((2, 3), np.float32),
        "integer": np.zeros(2, np.int64),
        "short": np.zeros(2, np.float16),
        "extra": np.zeros(1, np.float32),
    }
    write_arrays(tmp_path / "model.safetensors", arrays, {"short": "F32"})
    expected = {"good": (3,), "misshaped": (3, 2), "integer": (2,), "short": (2,), "absent": (4, 5)}
    with pytest.raises(CheckpointError) as error:
        select_tensors(open_checkpoint(tmp_path), expected)
    assert str(tmp_path) in str(error.value)
    assert str(error.value).split("\n  - ")[1:] == [
        "misshaped has shape [2, 3], expected [3, 2]",
        "integer is stored as I64, expected F32, F16, BF16: quantised checkpoints are not supported",
        "short holds 4 bytes, not what its shape [2] and F32 need",
        "absent is missing, expected shape [4, 5]",
        "extra is unexpected",
    ]


def test_many_tensor_faults_are_counted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, {"a": (1,)})
    with pytest.raises(CheckpointError, match=r"\n  - and 11 more$") as error:
        select_tensors(open_checkpoint(tmp_path), {f"x{i}": (1,) for i in range(30)})
    assert str(error.value).count("is missing") == 20


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("place", [0, 9])
def test_not_finite_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, dtype: type, place: int) -> None:
    monkeypatch.setattr(checkpoint_module, "_CHUNK", 4)
    array = np.ones(10, dtype)
    good = stored(tmp_path / "good.safetensors", array)
    array[place] = value
    bad = stored(tmp_path / "bad.safetensors", array)
    assert good.is_finite()
    assert not bad.is_finite()
    check_finite({"model.good": good})
    with pytest.raises(CheckpointError, match=r"model\.bad") as error:
        check_finite({"model.good": good, "model.bad": bad})
    assert "model.good" not in str(error.value)


@pytest.mark.parametrize(("bits", "finite"), [(0x7F80, False), (0xFF80, False), (0x7FC0, False), (0x7F7F, True)])
def test_not_finite_in_bfloat16(tmp_path: Path, bits: int, finite: bool) -> None:
    (tensor,) = read_header(write_arrays(tmp_path / "x.safetensors", {"x": np.array([0, bits], np.uint16)}, {"x": "BF16"}))
    assert tensor.is_finite() == finite


def test_same_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "_CHUNK", 4)
    values = np.arange(10, dtype=np.float32)
    first = stored(tmp_path / "first.safetensors", values)
    assert first.same_content(stored(tmp_path / "same.safetensors", values.copy()))
    for place in (0, 9):
        other = values.copy()
        other[place] += 1
        assert not first.same_content(stored(tmp_path / f"{place}.safetensors", other))
    assert not first.same_content(stored(tmp_path / "shape.safetensors", values.reshape(2, 5)))
    (half,) = read_header(write_arrays(tmp_path / "dtype.safetensors", {"x": values.astype(np.float16)}))
    assert not first.same_content(half)


@pytest.mark.parametrize("cut", [1, 4, 40])
def test_file_that_shrinks_while_it_is_read(tmp_path: Path, cut: int) -> None:
    tensor = stored(tmp_path / "x.safetensors", np.arange(10, dtype=np.float32))
    tensor.file.write_bytes(tensor.file.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"x\.safetensors ended inside tensor x"):
        list(tensor.chunks())


@pytest.mark.parametrize(
    ("files", "root"),
    [
        (["/models/target/a", "/models/target/b"], "/models/target"),
        (["/models/target/a", "/models/drafter/b"], "/models"),
        (["/models/target/a", "/models/b"], "/models"),
        (["/models/target/a", "/models/target-2/b"], "/models"),
    ],
)
def test_common_root(files: list[str], root: str) -> None:
    assert common_root([Path(file) for file in files]) == Path(root)


def test_no_common_root_says_what_to_do() -> None:
    with pytest.raises(ExportError, match="--copy-weights") as error:
        common_root([Path("/disk-1/target/model.safetensors"), Path("/disk-2/drafter/model.safetensors")])
    assert "/disk-1/target" in str(error.value)
    assert "/disk-2/drafter" in str(error.value)


def test_paths_on_different_drives_have_no_common_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def commonpath(paths: set[str]) -> str:
        raise ValueError(f"different drives: {paths}")

    monkeypatch.setattr("dspark.export.weights.os.path.commonpath", commonpath)
    with pytest.raises(ExportError, match="--copy-weights"):
        common_root([Path("/models/target/a"), Path("/models/drafter/b")])


def test_common_root_resolves_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "elsewhere" / "snapshot"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("a", "b"):
        (blobs / name).write_bytes(b"")
        (snapshot / name).symlink_to(blobs / name)
    assert common_root([snapshot / "a", snapshot / "b"]) == blobs.resolve()
