"""Whether a drafter belongs to a target, and which stored tensor each parameter of both takes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, PAIR, SMALL
from random_pair import Shape, drafter_config, drafter_tensors, target_config, target_tensors, write_checkpoint

from dspark.export.checkpoint import open_checkpoint
from dspark.export.configs import read_drafter_config, read_target_config
from dspark.export.pair import Pair, check_pair, load_pair, tensors_of_drafter, tensors_of_target
from dspark.runtime.errors import CheckpointError, ConfigError

TIED = replace(SMALL, tied=True)
SHARED = ("embed_tokens.weight", "lm_head.weight")


def write_target(directory: Path, shape: Shape = SMALL, **changes: Any) -> Path:
    """Write a sparse target and return its directory."""
    write_checkpoint(directory / "target", target_config(shape) | changes, target_tensors(shape), sparse=True)
    return directory / "target"


def write_drafter(directory: Path, shape: Shape = SMALL, absent: tuple[str, ...] = (), **changes: Any) -> Path:
    """Write a sparse drafter without some tensors and return its directory."""
    tensors = {name: size for name, size in drafter_tensors(shape).items() if name not in absent}
    write_checkpoint(directory / "drafter", drafter_config(shape) | changes, tensors, sparse=True)
    return directory / "drafter"


def write_tokenizer(directory: Path, vocabulary: dict[str, int], added: dict[str, int] | None = None) -> None:
    """Write the least of a tokenizer.json."""
    tokens = [{"id": i, "content": token} for token, i in (added or {}).items()]
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}))


def letters(size: int, **other: int) -> dict[str, int]:
    """Return a vocabulary of `size` ids; `other` renames the token of an id."""
    names = {i: f"t{i}" for i in range(size)} | {i: name for name, i in other.items()}
    return {name: i for i, name in names.items()}


def check(target: Path, drafter: Path) -> None:
    """Check the pair of two directories."""
    check_pair(read_target_config(target), read_drafter_config(drafter), target, drafter)


def faults(error: pytest.ExceptionInfo[BaseException]) -> list[str]:
    """Return the faults that an error lists."""
    return str(error.value).split("\n  - ")[1:]


def checked_faults(target: Path, drafter: Path) -> list[str]:
    """Return the faults that checking the pair finds, and assert that the error names both directories."""
    with pytest.raises(ConfigError) as error:
        check(target, drafter)
    assert f"{drafter} is no drafter for {target}" in str(error.value)
    return faults(error)


def assert_every_parameter_has_its_tensor(pair: Pair, shape: Shape) -> None:
    """Assert that each parameter takes the stored tensor of its own name."""
    names = {name.removeprefix("model."): name for name in target_tensors(shape)}
    assert {name: t.name for name, t in pair.target_tensors.items()} == names | ({SHARED[1]: names[SHARED[0]]} if shape.tied else {})
    assert {name: tensor.name for name, tensor in pair.drafter_tensors.items()} == {name: name for name in drafter_tensors(shape)}
    assert all(tensor.file.parent.name == "target" for tensor in pair.target_tensors.values())
    assert all(tensor.file.parent.name == "drafter" for tensor in pair.drafter_tensors.values())


@pytest.mark.parametrize("shape", [SMALL, TIED], ids=["untied", "tied"])
def test_matching_pair_loads(tmp_path: Path, shape: Shape) -> None:
    target, drafter = write_target(tmp_path, shape), write_drafter(tmp_path, shape)
    pair = load_pair(target, drafter)
    assert pair.target == read_target_config(target)
    assert pair.drafter == read_drafter_config(drafter)
    assert (pair.target_checkpoint.directory, pair.drafter_checkpoint.directory) == (target, drafter)
    assert_every_parameter_has_its_tensor(pair, shape)


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("drafter_layers", [1, 3])
def test_drafter_parameters_follow_its_config(tmp_path: Path, rank: int, drafter_layers: int) -> None:
    shape = replace(SMALL, rank=rank, drafter_layers=drafter_layers)
    assert_every_parameter_has_its_tensor(load_pair(write_target(tmp_path, shape), write_drafter(tmp_path, shape)), shape)


@pytest.mark.parametrize("directory", [PAIR, *sorted(p for p in GOLDEN.iterdir() if p.is_dir())], ids=lambda path: path.name)
def test_pairs_of_the_repository_load(directory: Path) -> None:
    pair = load_pair(directory / "target", directory / "drafter")
    assert pair.drafter_tensors[SHARED[0]].shape == (pair.target.vocab_size, pair.target.hidden_size)


def test_mask_token_id_argument_reaches_the_config(tmp_path: Path) -> None:
    assert load_pair(write_target(tmp_path), write_drafter(tmp_path), 319).drafter.mask_token_id == 319


def test_all_mismatches_in_one_error(tmp_path: Path) -> None:
    target = write_target(tmp_path, replace(SMALL, hidden=96, vocabulary=300, layers=4))
    with pytest.raises(ConfigError) as error:
        load_pair(target, write_drafter(tmp_path))
    assert faults(error) == [
        "hidden_size: the target has 96, the drafter expects 64",
        "vocab_size: the target has 300, the drafter expects 320",
        "number of target layers: the target has 4, the drafter expects 6",
        "mask_token_id 301 is outside the target embedding's 300 rows",
        "target_layer_ids [3, 4] are no layers before the last of the target's 4",
    ]


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        (replace(SMALL, hidden=96), "hidden_size: the target has 96"),
        (replace(SMALL, vocabulary=319), "vocab_size: the target has 319"),
        (replace(SMALL, layers=7), "number of target layers: the target has 7"),
        (replace(SMALL, layers=8), "number of target layers: the target has 8"),
    ],
)
def test_one_mismatch(tmp_path: Path, shape: Shape, fault: str) -> None:
    (found,) = checked_faults(write_target(tmp_path, shape), write_drafter(tmp_path))
    assert found.startswith(fault)


@pytest.mark.parametrize(
    "shape",
    [replace(SMALL, heads=2, kv_heads=1, head_dim=32), replace(SMALL, intermediate=128), replace(SMALL, theta=1e4, positions=64)],
)
def test_layers_of_another_form_are_no_mismatch(tmp_path: Path, shape: Shape) -> None:
    check(write_target(tmp_path, shape), write_drafter(tmp_path))


@pytest.mark.parametrize("size", [1, 300, 320])
@pytest.mark.parametrize("with_drafter", [True, False])
def test_tokenizer_may_have_fewer_ids_than_rows(tmp_path: Path, size: int, with_drafter: bool) -> None:
    target, drafter = write_target(tmp_path), write_drafter(tmp_path)
    write_tokenizer(target, letters(size))
    if with_drafter:
        write_tokenizer(drafter, letters(size))
    check(target, drafter)


def test_tokenizers_of_the_same_tokens_in_another_place_agree(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path), write_drafter(tmp_path)
    write_tokenizer(target, letters(300), {"<mask>": 300})
    write_tokenizer(drafter, letters(300) | {"<mask>": 300})
    check(target, drafter)


def test_token_id_of_another_string(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path), write_drafter(tmp_path)
    write_tokenizer(target, letters(300))
    write_tokenizer(drafter, letters(300, other=17))
    assert checked_faults(target, drafter) == ["token id 17 is 't17' for the target and 'other' for the drafter"]


def test_added_token_of_another_string(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path), write_drafter(tmp_path)
    write_tokenizer(target, letters(300), {"<mask>": 301})
    write_tokenizer(drafter, letters(300), {"<pad>": 301})
    assert checked_faults(target, drafter) == ["token id 301 is '<mask>' for the target and '<pad>' for the drafter"]


@pytest.mark.parametrize(("ours", "theirs"), [(300, 299), (299, 300), (300, 302)])
def test_tokenizers_of_other_sizes(tmp_path: Path, ours: int, theirs: int) -> None:
    """Only equal ids are compared: a drafter may add a mask token, or lack what the target added."""
    target, drafter = write_target(tmp_path), write_drafter(tmp_path)
    write_tokenizer(target, letters(ours))
    write_tokenizer(drafter, letters(theirs))
    load_pair(target, drafter)


@pytest.mark.parametrize("added", [None, {"<end>": 320}])
def test_tokenizer_with_more_ids_than_rows(tmp_path: Path, added: dict[str, int] | None) -> None:
    target, drafter = write_target(tmp_path), write_drafter(tmp_path)
    write_tokenizer(target, letters(320 if added else 321), added)
    assert checked_faults(target, drafter) == ["the target's tokenizer has id 320, its embedding only 320 rows"]


@pytest.mark.parametrize("model", ["target", "drafter"])
@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"model": null}',
        '{"model": {"vocab": [["a", -1.0]]}}',
        '{"model": {"vocab": {"a": "x"}}}',
        '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}',
        '{"model": {"vocab": {"a": 0}}, "added_tokens": [3]}',
    ],
)
def test_damaged_tokenizer_is_named(tmp_path: Path, model: str, content: str) -> None:
    target, drafter = write_target(tmp_path), write_drafter(tmp_path)
    path = tmp_path / model / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(CheckpointError) as error:
        check(target, drafter)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("shape", [SMALL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("absent", [SHARED, SHARED[:1], SHARED[1:]], ids=["both", "embedding", "head"])
def test_missing_embedding_and_head_are_the_targets(tmp_path: Path, shape: Shape, absent: tuple[str, ...]) -> None:
    pair = load_pair(write_target(tmp_path, shape), write_drafter(tmp_path, shape, absent))
    for name in SHARED:
        if name in absent:
            assert pair.drafter_tensors[name] is pair.target_tensors[name]
        else:
            assert pair.drafter_tensors[name] is pair.drafter_checkpoint.tensors[name]
    assert list(pair.drafter_tensors) == list(load_pair(tmp_path / "target", write_drafter(tmp_path, shape)).drafter_tensors)
    if shape.tied:
        assert all(pair.target_tensors[name] is pair.target_checkpoint.tensors["model.embed_tokens.weight"] for name in SHARED)


@pytest.mark.parametrize("absent", [SHARED, SHARED[:1], SHARED[1:]], ids=["both", "embedding", "head"])
def test_missing_embedding_and_head_need_a_target(tmp_path: Path, absent: tuple[str, ...]) -> None:
    drafter = write_drafter(tmp_path, absent=absent)
    with pytest.raises(CheckpointError) as error:
        tensors_of_drafter(read_drafter_config(drafter), open_checkpoint(drafter), None)
    assert [name for name in SHARED if name in str(error.value)] == list(absent)


def test_whole_drafter_needs_no_target(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path)
    checkpoint = open_checkpoint(drafter)
    assert tensors_of_drafter(read_drafter_config(drafter), checkpoint, None) == dict(checkpoint.tensors)


@pytest.mark.parametrize("bias", [True, False])
def test_confidence_bias_is_found_in_the_tensors(tmp_path: Path, bias: bool) -> None:
    name = "confidence_head.proj.bias"
    pair = load_pair(write_target(tmp_path), write_drafter(tmp_path, absent=() if bias else (name,)))
    assert pair.drafter.confidence_head_bias is bias
    assert (name in pair.drafter_tensors) is bias
    assert "confidence_head.proj.weight" in pair.drafter_tensors


def test_disabled_confidence_head_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dspark"):
        pair = load_pair(write_target(tmp_path), write_drafter(tmp_path, enable_confidence_head=False))
    assert not pair.drafter.enable_confidence_head
    assert not [name for name in pair.drafter_tensors if name.startswith("confidence_head")]
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    assert str(tmp_path / "drafter") in message
    assert "enable_confidence_head is false" in message
    assert "confidence_head.proj.bias, confidence_head.proj.weight" in message


def test_usual_pair_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dspark"):
        load_pair(write_target(tmp_path), write_drafter(tmp_path))
    assert not caplog.records


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "layers.1.self_attn.q_norm.weight",
        "layers.0.mlp.down_proj.weight",
        "markov_head.markov_w1.weight",
        "confidence_head.proj.weight",
    ],
)
def test_missing_tensor_of_the_drafter_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load_pair(write_target(tmp_path), write_drafter(tmp_path, absent=(name,)))
    (fault,) = faults(error)
    assert fault.startswith(f"{name} is missing")
    assert str(tmp_path / "drafter") in str(error.value)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.5.mlp.up_proj.weight", "lm_head.weight"])
def test_missing_tensor_of_the_target_is_named(tmp_path: Path, name: str) -> None:
    tensors = {other: size for other, size in target_tensors(SMALL).items() if other != name}
    write_checkpoint(tmp_path / "target", target_config(SMALL), tensors, sparse=True)
    with pytest.raises(CheckpointError) as error:
        load_pair(tmp_path / "target", write_drafter(tmp_path))
    (fault,) = faults(error)
    assert fault.startswith(f"{name} is missing")
    assert str(tmp_path / "target") in str(error.value)


def test_tensor_faults_of_the_drafter_in_one_error(tmp_path: Path) -> None:
    tensors = drafter_tensors(SMALL) | {"fc.weight": (64, 64), "extra.weight": (2,)}
    del tensors["norm.weight"]
    write_checkpoint(tmp_path / "drafter", drafter_config(SMALL), tensors, sparse=True)
    with pytest.raises(CheckpointError) as error:
        load_pair(write_target(tmp_path), tmp_path / "drafter")
    assert sorted(faults(error)) == [
        "extra.weight is unexpected",
        "fc.weight has shape [64, 64], expected [64, 192]",
        "norm.weight is missing, expected shape [64]",
    ]


@pytest.mark.parametrize("stored_head", [True, False])
def test_head_of_a_tied_target_is_its_embedding(tmp_path: Path, stored_head: bool) -> None:
    tensors = target_tensors(TIED) | ({"lm_head.weight": (320, 64)} if stored_head else {})
    write_checkpoint(tmp_path / "target", target_config(TIED), tensors, sparse=True)
    checkpoint = open_checkpoint(tmp_path / "target")
    assert ("lm_head.weight" in checkpoint.tensors) is stored_head
    found = tensors_of_target(read_target_config(tmp_path / "target"), checkpoint)
    assert found["lm_head.weight"] is found["embed_tokens.weight"] is checkpoint.tensors["model.embed_tokens.weight"]


def test_untied_target_keeps_its_head(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_target(tmp_path))
    found = tensors_of_target(read_target_config(tmp_path / "target"), checkpoint)
    assert found["lm_head.weight"] is checkpoint.tensors["lm_head.weight"]


def test_quantization_config_with_plain_tensors_loads(tmp_path: Path) -> None:
    plain = load_pair(write_target(tmp_path), write_drafter(tmp_path))
    quantised = load_pair(write_target(tmp_path, quantization_config={"quant_method": "fp8"}), tmp_path / "drafter")
    assert quantised == plain


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    directory = write_target(tmp_path, quantization_config={"quant_method": "fp8"})
    name, path = "model.layers.0.mlp.up_proj.weight", directory / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header[name]["dtype"] = "F8_E4M3"
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + content[end:])
    with pytest.raises(CheckpointError) as error:
        load_pair(directory, write_drafter(tmp_path))
    (fault,) = faults(error)
    assert name in fault
    assert "F8_E4M3" in fault
    assert "quantised checkpoints are not supported" in fault
