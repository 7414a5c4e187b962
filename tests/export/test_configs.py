"""Reading config.json: every published layout, what is refused and by which name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, PAIR, SMALL, SMALL_DRAFTER
from random_pair import SHAPES, drafter_config, target_config

from dspark.export.configs import read_drafter_config, read_target_config
from dspark.runtime.config import DrafterConfig, TargetConfig
from dspark.runtime.errors import CheckpointError, ConfigError, UnsupportedConfigError

Config = dict[str, Any]

DRAFTER_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
READERS = {"target": (read_target_config, target_config), "drafter": (read_drafter_config, drafter_config)}


def write(directory: Path, config: object) -> Path:
    """Write config.json into `directory` and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def changed(config: Config, changes: Config, *absent: str) -> Config:
    """Return the configuration with some keys changed and some taken out."""
    return {key: value for key, value in (config | changes).items() if key not in absent}


def read_target(directory: Path, changes: Config, *absent: str) -> TargetConfig:
    """Read SMALL's target with changes."""
    return read_target_config(write(directory, changed(target_config(SMALL), changes, *absent)))


def read_drafter(directory: Path, changes: Config, *absent: str, mask: int | None = None) -> DrafterConfig:
    """Read SMALL's drafter with changes."""
    return read_drafter_config(write(directory, changed(drafter_config(SMALL), changes, *absent)), mask)


def in_layout(layout: str) -> Config:
    """Return SMALL's drafter with its drafter keys flat, prefixed or nested."""
    flat = drafter_config(SMALL)
    own = {key: flat.pop(key) for key in DRAFTER_KEYS}
    if layout == "flat":
        return flat | own
    if layout == "prefixed":
        return flat | {f"dspark_{key}": value for key, value in own.items()}
    if layout == "mixed":
        names = ("mask_token_id", "target_layer_ids")
        return flat | {"dflash_config": {n: own[n] for n in names}} | {k: v for k, v in own.items() if k not in names}
    return flat | {layout: own}


def faults(error: pytest.ExceptionInfo[BaseException]) -> list[str]:
    """Return the faults that an error lists."""
    return str(error.value).split("\n  - ")[1:]


@pytest.mark.parametrize("layout", ["flat", "prefixed", "dspark_config", "dflash_config", "mixed"])
def test_layouts_agree(tmp_path: Path, layout: str) -> None:
    assert read_drafter_config(write(tmp_path, in_layout(layout))) == SMALL_DRAFTER


@pytest.mark.parametrize("model", READERS)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500000}},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_parameters": None},
        {"rope_theta": 500000, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_rope_layouts_agree(tmp_path: Path, model: str, rope: Config) -> None:
    read, make = READERS[model]
    plain = make(SMALL) | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    expected = read(write(tmp_path / "plain", plain))
    config = read(write(tmp_path / "other", changed(make(SMALL), {}, "rope_parameters") | rope))
    assert config == expected
    assert config.rope_theta == 5e5


@pytest.mark.parametrize("model", READERS)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"type": "yarn", "factor": 4.0},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic"},
        {"rope_type": "llama3"},
        {"rope_type": "proportional"},
        {"rope_type": "default", "factor": 2.0},
    ],
)
def test_rope_scaling_is_refused(tmp_path: Path, model: str, key: str, rope: Config) -> None:
    read, make = READERS[model]
    config = changed(make(SMALL), {"rope_theta": 1e6}, "rope_parameters") | {key: rope}
    with pytest.raises(UnsupportedConfigError, match=rf"config\.json.*\n  - {key} ") as error:
        read(write(tmp_path, config))
    assert len(faults(error)) == 1


@pytest.mark.parametrize("theta", [None, 0, -1.0, "1e6", True])
def test_rope_theta_must_be_a_positive_number(tmp_path: Path, theta: object) -> None:
    with pytest.raises(ConfigError, match="rope_theta is"):
        read_target(tmp_path, {"rope_theta": theta}, "rope_parameters")


@pytest.mark.parametrize("architectures", [["Qwen3DSparkModel"], ["DSparkDraftModel"], ["Other", "Qwen3DSparkModel"]])
def test_drafter_architectures(tmp_path: Path, architectures: list[str]) -> None:
    assert read_drafter(tmp_path, {"architectures": architectures}) == SMALL_DRAFTER


@pytest.mark.parametrize("changes", [{"hc_mult": 4}, {"model_type": "deepseek_v4"}, {"model_type": "deepseek_v4", "hc_mult": 4}])
@pytest.mark.parametrize("architecture", ["DSparkDraftModel", "DeepseekV4ForCausalLM"])
def test_deepseek_drafter_is_refused(tmp_path: Path, changes: Config, architecture: str) -> None:
    with pytest.raises(UnsupportedConfigError, match="DeepSeek-V4 in-checkpoint drafter not supported"):
        read_drafter(tmp_path, changes | {"architectures": [architecture]})


@pytest.mark.parametrize(
    ("model", "changes", "name"),
    [
        ("target", {"architectures": ["Qwen3MoeForCausalLM"]}, "architectures"),
        ("target", {"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ("target", {"architectures": None}, "architectures"),
        ("target", {"hidden_act": "gelu"}, "hidden_act"),
        ("target", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("drafter", {"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
        ("drafter", {"architectures": None}, "architectures"),
        ("drafter", {"model_type": "llama"}, "model_type"),
        ("drafter", {"hidden_act": "gelu"}, "hidden_act"),
        ("drafter", {"speculators_model_type": "dspark"}, "speculators_model_type"),
        ("drafter", {"sample_from_anchor": False}, "sample_from_anchor"),
        ("drafter", {"dspark_sample_from_anchor": False}, "sample_from_anchor"),
        ("drafter", {"dflash_config": {"sample_from_anchor": False}}, "sample_from_anchor"),
    ],
)
def test_unsupported_is_named(tmp_path: Path, model: str, changes: Config, name: str) -> None:
    read, make = READERS[model]
    with pytest.raises(UnsupportedConfigError) as error:
        read(write(tmp_path, make(SMALL) | changes))
    assert [fault.split()[0].rstrip(":") for fault in faults(error)] == [name]


def test_sample_from_anchor_true_loads(tmp_path: Path) -> None:
    assert read_drafter(tmp_path, {"sample_from_anchor": True}) == SMALL_DRAFTER


@pytest.mark.parametrize("model", READERS)
@pytest.mark.parametrize(
    "window",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": False},
        {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1},
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28},
        {"layer_types": "full"},
        {"layer_types": "full", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0},
    ],
)
def test_no_sliding_window(tmp_path: Path, model: str, window: Config) -> None:
    read, make = READERS[model]
    config = make(SMALL)
    if "layer_types" in window:
        window = window | {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    assert read(write(tmp_path / "window", config | window)) == read(write(tmp_path / "plain", config))


@pytest.mark.parametrize("model", READERS)
@pytest.mark.parametrize("window", [{}, {"sliding_window": 4096, "use_sliding_window": True}])
def test_sliding_layer_is_refused(tmp_path: Path, model: str, window: Config) -> None:
    read, make = READERS[model]
    config = make(SMALL)
    kinds = ["full_attention"] * (config["num_hidden_layers"] - 1) + ["sliding_attention"]
    with pytest.raises(UnsupportedConfigError, match="layer_types holds 'sliding_attention'"):
        read(write(tmp_path, config | window | {"layer_types": kinds}))


@pytest.mark.parametrize("model", READERS)
@pytest.mark.parametrize("first", [0, 1])
def test_used_sliding_window_is_refused(tmp_path: Path, model: str, first: int) -> None:
    read, make = READERS[model]
    window = {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": first}
    with pytest.raises(UnsupportedConfigError, match="full attention in every layer"):
        read(write(tmp_path, make(SMALL) | window))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"sliding_window": "4096"}, "sliding_window is '4096'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers 2"),
    ],
)
def test_faulty_window_keys(tmp_path: Path, changes: Config, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as error:
        read_drafter(tmp_path, changes)
    assert len(faults(error)) == 1


@pytest.mark.parametrize("taps", [[-1], [-1, 1, 4], [0], [0, 1, 2, 3, 4]])
def test_taps_before_the_last_layer(tmp_path: Path, taps: list[int]) -> None:
    assert read_drafter(tmp_path, {"target_layer_ids": taps}).target_layer_ids == tuple(taps)


@pytest.mark.parametrize("taps", [[5], [1, 3, 5]])
def test_last_layer_as_tap_is_refused(tmp_path: Path, taps: list[int]) -> None:
    with pytest.raises(UnsupportedConfigError, match=r"taps the last layer 5.*expected .* in -1\.\.4"):
        read_drafter(tmp_path, {"target_layer_ids": taps})


@pytest.mark.parametrize("taps", [[6], [1, 3, 60], [-2, 1], [3, 1], [1, 1], [], 3, "1,3", {"1": 3}, [1, "3"], [1.0], [True]])
def test_faulty_taps(tmp_path: Path, taps: object) -> None:
    with pytest.raises(ConfigError, match=r"target_layer_ids .*in -1\.\.4") as error:
        read_drafter(tmp_path, {"target_layer_ids": taps})
    assert len(faults(error)) == 1


@pytest.mark.parametrize(
    ("argument", "flat", "nested", "expected"),
    [(300, 301, 302, 300), (None, 301, 302, 301), (None, None, 302, 302), (0, 301, 302, 0), (None, 0, 302, 0)],
)
def test_mask_id_order(tmp_path: Path, argument: int | None, flat: int | None, nested: int, expected: int) -> None:
    for key in ("dspark_config", "dflash_config"):
        changes = {"mask_token_id": flat, key: {"mask_token_id": nested}}
        assert read_drafter(tmp_path, changes, mask=argument).mask_token_id == expected


def test_prefixed_mask_id_goes_before_nested(tmp_path: Path) -> None:
    changes = {"dspark_mask_token_id": 303, "dflash_config": {"mask_token_id": 302}}
    assert read_drafter(tmp_path, changes, "mask_token_id").mask_token_id == 303


def test_missing_mask_id_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mask_token_id is missing.*--mask-token-id"):
        read_drafter(tmp_path, {}, "mask_token_id")


@pytest.mark.parametrize("mask", [320, 321])
@pytest.mark.parametrize("as_argument", [True, False])
def test_mask_id_outside_the_rows(tmp_path: Path, mask: int, as_argument: bool) -> None:
    changes, argument = ({}, mask) if as_argument else ({"mask_token_id": mask}, None)
    with pytest.raises(ConfigError, match=f"mask_token_id {mask} is outside the embedding's 320 rows"):
        read_drafter(tmp_path, changes, mask=argument)


@pytest.mark.parametrize("mask", [-1, True, "301", 301.0])
def test_mask_id_of_another_kind(tmp_path: Path, mask: object) -> None:
    with pytest.raises(ConfigError, match="mask_token_id is"):
        read_drafter(tmp_path, {"mask_token_id": mask})


@pytest.mark.parametrize(
    ("changes", "absent", "expected"),
    [
        ({"markov_rank": 0, "confidence_head_with_markov": False}, ["markov_head_type"], (0, "none")),
        ({"markov_rank": 0, "confidence_head_with_markov": False}, [], (0, "none")),
        ({"confidence_head_with_markov": False}, ["markov_rank", "markov_head_type"], (0, "none")),
        ({"markov_head_type": "gated"}, [], (8, "gated")),
        ({"markov_head_type": "Gated"}, [], (8, "gated")),
        ({"markov_head_type": "rnn"}, [], (8, "rnn")),
        ({"markov_head_type": "RNN"}, [], (8, "rnn")),
        ({"markov_head_type": "VANILLA"}, [], (8, "vanilla")),
    ],
)
def test_markov_heads(tmp_path: Path, changes: Config, absent: list[str], expected: tuple[int, str]) -> None:
    config = read_drafter(tmp_path, changes, *absent)
    assert (config.markov_rank, config.markov_head_type) == expected


@pytest.mark.parametrize("kind", ["lstm", "", None, "none", 3])
def test_unknown_markov_head(tmp_path: Path, kind: object) -> None:
    with pytest.raises(ConfigError, match=r"markov_head_type is .* with markov_rank 8, expected one of vanilla, gated, rnn"):
        read_drafter(tmp_path, {"markov_head_type": kind})


def test_confidence_with_markov_needs_a_rank(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="confidence_head_with_markov is true but markov_rank is 0"):
        read_drafter(tmp_path, {"markov_rank": 0})


@pytest.mark.parametrize("changes", [{"enable_confidence_head": False}, {"enable_confidence_head": False, "markov_rank": 0}])
def test_no_confidence_head_reads_no_markov_row(tmp_path: Path, changes: Config) -> None:
    config = read_drafter(tmp_path, changes)
    assert not config.enable_confidence_head
    assert not config.confidence_head_with_markov


def test_all_faults_in_one_error(tmp_path: Path) -> None:
    changes = {
        "rope_scaling": {"rope_type": "yarn"},
        "hidden_size": 0,
        "rms_norm_eps": "small",
        "attention_bias": 1,
        "block_size": 7.5,
        "mask_token_id": 320,
        "target_layer_ids": [3, 1],
        "markov_head_type": "lstm",
        "num_key_value_heads": 3,
    }
    with pytest.raises(UnsupportedConfigError) as error:
        read_drafter(tmp_path, changes, "intermediate_size")
    names = {fault.split()[0] for fault in faults(error)}
    assert names == (set(changes) | {"intermediate_size", "num_attention_heads"}) - {"num_key_value_heads"}
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    ("model", "key"),
    [
        *(
            (model, key)
            for model in READERS
            for key in (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "vocab_size",
                "rms_norm_eps",
                "max_position_embeddings",
            )
        ),
        ("drafter", "block_size"),
        ("drafter", "num_target_layers"),
        ("drafter", "target_layer_ids"),
    ],
)
def test_a_missing_key_is_the_only_fault(tmp_path: Path, model: str, key: str) -> None:
    read, make = READERS[model]
    with pytest.raises(ConfigError) as error:
        read(write(tmp_path, changed(make(SMALL), {}, key)))
    assert [fault.split()[0] for fault in faults(error)] == [key]


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "attention_bias", "tie_word_embeddings", "hidden_act"])
def test_keys_with_defaults(tmp_path: Path, key: str) -> None:
    given = {"num_key_value_heads": 4}
    assert read_target(tmp_path / "absent", given, key) == read_target(tmp_path / "given", given)


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(15, 4, 2), (16, 4, 3), (0, 4, 2), (-16, 4, 2)])
def test_impossible_heads(tmp_path: Path, head_dim: int, heads: int, kv_heads: int) -> None:
    changes = {"head_dim": head_dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    with pytest.raises(ConfigError, match=r"head_dim is|no multiple of num_key_value_heads 3"):
        read_target(tmp_path, changes)


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("head_dim", {}),
        ("num_key_value_heads", {}),
        ("attention_bias", {}),
        ("tie_word_embeddings", {}),
        ("layer_types", {}),
        ("max_window_layers", {"use_sliding_window": True, "sliding_window": 4096}),
    ],
)
def test_null_stands_for_absent(tmp_path: Path, key: str, others: Config) -> None:
    assert read_target(tmp_path / "null", others | {key: None}) == read_target(tmp_path / "absent", others, key)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architectures": 3}, "architectures"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "architectures"),
        ({"layer_types": 3}, "layer_types"),
        ({"max_window_layers": "2", "use_sliding_window": True, "sliding_window": 4096}, "max_window_layers"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta"),
    ],
    ids=["architectures", "nested", "layer_types", "max_window_layers", "huge", "nan", "rope_parameters", "infinite"],
)
def test_values_of_another_kind(tmp_path: Path, changes: Config, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_target(tmp_path, changes)


@pytest.mark.parametrize("read", [read_target_config, read_drafter_config])
def test_missing_config(tmp_path: Path, read: Any) -> None:
    with pytest.raises(CheckpointError, match="does not exist") as error:
        read(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere" / "config.json") in str(error.value)


def test_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"")
    with pytest.raises(CheckpointError) as error:
        read_target_config(tmp_path / "model")
    assert str(tmp_path / "model") in str(error.value)


@pytest.mark.parametrize("read", [read_target_config, read_drafter_config])
@pytest.mark.parametrize(
    "content",
    [b"", b'{"hidden_size": 64', b"[1, 2]", b'"text"', b"null", b"\xff\xfe{}", b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000],
    ids=["empty", "cut", "list", "string", "null", "not utf-8", "huge number", "too deep"],
)
def test_broken_config(tmp_path: Path, read: Any, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        read(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_published_shape(tmp_path: Path) -> None:
    shape = SHAPES["8b"]
    common = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "attention_bias": False,
    }
    target = read_target_config(write(tmp_path / "target", target_config(shape)))
    assert target == TargetConfig(**common, num_hidden_layers=36, tie_word_embeddings=False)
    drafter = read_drafter_config(write(tmp_path / "drafter", drafter_config(shape)))
    assert drafter == DrafterConfig(
        **common,
        num_hidden_layers=5,
        block_size=7,
        mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
        markov_rank=256,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    assert drafter.taps_width == 5 * 4096


@pytest.mark.parametrize("directory", [PAIR, *sorted(p for p in GOLDEN.iterdir() if p.is_dir())], ids=lambda path: path.name)
def test_pairs_of_the_repository(directory: Path) -> None:
    target, drafter = read_target_config(directory / "target"), read_drafter_config(directory / "drafter")
    assert (target.num_hidden_layers, target.hidden_size) == (drafter.num_target_layers, drafter.hidden_size)


@pytest.mark.parametrize("model", READERS)
def test_quantization_config_changes_nothing(tmp_path: Path, model: str) -> None:
    read, make = READERS[model]
    quantised = make(SMALL) | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "dtype": "float8"}
    assert read(write(tmp_path / "quantised", quantised)) == read(write(tmp_path / "plain", make(SMALL)))
