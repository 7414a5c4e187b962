"""Read the config.json of a Qwen3 target or a DSpark drafter, in every published layout, into the runtime's configuration classes.

Knows layouts, defaults and what is not supported. Does not look at tensors. All faults of a file are reported in one error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from dspark.runtime.config import DrafterConfig, TargetConfig
from dspark.runtime.errors import CheckpointError, ConfigError, UnsupportedConfigError, numbered

_TARGET_ARCHITECTURES = ("Qwen3ForCausalLM",)
_DRAFTER_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
_NESTED_KEYS = ("dspark_config", "dflash_config")
_MARKOV_HEADS = ("vanilla", "gated", "rnn")
_MAX_WINDOW_LAYERS = 28
_MISSING = object()
_LARGEST = 10**15
"""Beyond any size of a model; above it a number is a fault, and NaN compares false."""


class _Reader:
    """Looks keys up in one configuration and collects faults."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values
        self.faults: list[str] = []
        self.unsupported: list[str] = []
        self.placeholders: set[str] = set()
        nested = [values[key] for key in _NESTED_KEYS if isinstance(values.get(key), dict)]
        self._drafter_layers = [values, {k.removeprefix("dspark_"): v for k, v in values.items() if k.startswith("dspark_")}]
        self._drafter_layers += nested

    def number(self, key: str, kind: type = int, *, default: Any = _MISSING, minimum: float = 1) -> Any:
        """Return a number of the transformer itself, at least `minimum`."""
        return self._check(key, self.values.get(key), kind, default, minimum)

    def drafter(self, key: str, kind: type = int, *, default: Any = _MISSING, minimum: float = 1) -> Any:
        """Return a drafter key: flat, then `dspark_`-prefixed, then nested."""
        return self._check(key, self.drafter_value(key), kind, default, minimum)

    def drafter_value(self, key: str) -> Any:
        """Return the raw value of a drafter key, or None."""
        return next((layer[key] for layer in self._drafter_layers if layer.get(key) is not None), None)

    def _check(self, key: str, value: Any, kind: type, default: Any, minimum: float) -> Any:
        if value is None:
            if default is not _MISSING:
                return default
            self.faults.append(f"{key} is missing")
        elif kind is bool:
            if isinstance(value, bool):
                return value
            self.faults.append(f"{key} is {value!r:.40}, expected true or false")
        elif isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
            self.faults.append(f"{key} is {value!r}, expected {'a number' if kind is float else 'an integer'}")
        elif not minimum <= value <= _LARGEST:
            self.faults.append(f"{key} is {value!r:.40}, expected {minimum} to {_LARGEST:.0e}")
        else:
            return kind(value)
        self.placeholders.add(key)
        return kind(max(minimum, 1))

    def known(self, *keys: str) -> bool:
        """Whether these keys had usable values: rules about placeholders would only add false faults."""
        return not self.placeholders & set(keys)

    def architectures(self) -> list[str]:
        """Return the class names of the configuration."""
        names = self.values.get("architectures")
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def finish(self) -> None:
        """Raise one error with all faults, if there are any."""
        if self.unsupported:
            faults = numbered(self.unsupported + self.faults)
            raise UnsupportedConfigError(f"{self.path} asks for what dspark does not support:{faults}")
        if self.faults:
            raise ConfigError(f"{self.path} is not usable:{numbered(self.faults)}")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CheckpointError(f"{path} does not exist: expected a directory with a downloaded Hugging Face model") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): download the file again") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, expected an object")
    return values


def read_target_config(directory: Path) -> TargetConfig:
    """Read a Qwen3 target's config.json. Raises ConfigError with all faults, CheckpointError when there is no such file."""
    reader = _Reader(path := directory / "config.json", read_json(path))
    if not set(_TARGET_ARCHITECTURES) & set(reader.architectures()):
        actual = reader.values.get("architectures")
        reader.unsupported.append(
            f"architectures is {actual!r:.80}, expected {list(_TARGET_ARCHITECTURES)}: the target must be a dense Qwen3"
            + (" (are target and drafter swapped?)" if set(_DRAFTER_ARCHITECTURES) & set(reader.architectures()) else "")
        )
    fields = _transformer(reader)
    tied = reader.number("tie_word_embeddings", bool, default=False)
    reader.finish()
    return TargetConfig(**fields, tie_word_embeddings=tied)


def read_drafter_config(directory: Path, mask_token_id: int | None = None) -> DrafterConfig:
    """Read a DSpark drafter's config.json; `mask_token_id` overrides the file's.

    Raises ConfigError with all faults, CheckpointError when there is no such file.
    """
    reader = _Reader(path := directory / "config.json", read_json(path))
    _refuse_other_drafters(reader)
    fields = _transformer(reader)
    block = reader.drafter("block_size")
    if mask_token_id is None:
        mask_token_id = reader.drafter("mask_token_id", minimum=0, default=None)
        if mask_token_id is None:
            reader.faults.append("mask_token_id is missing at the top level and in dspark_config / dflash_config: pass --mask-token-id")
            mask_token_id = 0
    if reader.known("vocab_size", "mask_token_id") and not 0 <= mask_token_id < fields["vocab_size"]:
        reader.faults.append(f"mask_token_id {mask_token_id} is outside the embedding's {fields['vocab_size']} rows")
    depth = reader.drafter("num_target_layers")
    taps = _taps(reader, depth)
    rank = reader.drafter("markov_rank", minimum=0, default=0)
    kind = str(reader.drafter_value("markov_head_type") or "").lower() if rank else "none"
    if rank and kind not in _MARKOV_HEADS:
        expected = ", ".join(_MARKOV_HEADS)
        reader.faults.append(f"markov_head_type is {kind!r} with markov_rank {rank}, expected one of {expected}")
    confidence = reader.drafter("enable_confidence_head", bool, default=False)
    with_markov = reader.drafter("confidence_head_with_markov", bool, default=False) if confidence else False
    if with_markov and not rank:
        reader.faults.append("confidence_head_with_markov is true but markov_rank is 0: there is no Markov row to read")
    reader.finish()
    return DrafterConfig(
        **fields,
        block_size=block,
        mask_token_id=mask_token_id,
        target_layer_ids=taps,
        num_target_layers=depth,
        markov_rank=rank,
        markov_head_type=kind,
        enable_confidence_head=confidence,
        confidence_head_with_markov=with_markov,
    )


def _refuse_other_drafters(reader: _Reader) -> None:
    values = reader.values
    if "hc_mult" in values or str(values.get("model_type", "")).startswith("deepseek"):
        raise UnsupportedConfigError(
            f"{reader.path}: DeepSeek-V4 in-checkpoint drafter not supported; pass a standalone Qwen3 DSpark drafter"
        )
    if "speculators_model_type" in values:
        reader.unsupported.append("speculators_model_type: the vLLM speculators layout; pass the original DSpark checkpoint")
    if not set(_DRAFTER_ARCHITECTURES) & set(reader.architectures()):
        actual = values.get("architectures")
        message = f"architectures is {actual!r:.80}, expected one of {', '.join(_DRAFTER_ARCHITECTURES)}"
        if set(_TARGET_ARCHITECTURES) & set(reader.architectures()):
            fault = f"{message} (this is a target: are target and drafter swapped?)"
            raise UnsupportedConfigError(f"{reader.path} asks for what dspark does not support:{numbered([fault])}")
        reader.unsupported.append(message)
    if values.get("model_type", "qwen3") != "qwen3":
        reader.unsupported.append(f"model_type is {values['model_type']!r}, expected 'qwen3'")
    if reader.drafter_value("sample_from_anchor") is False:
        reader.unsupported.append(
            "sample_from_anchor is false: a mask-filling block (original DFlash) predicts from other rows than a DSpark block"
        )


def _taps(reader: _Reader, depth: int) -> tuple[int, ...]:
    taps = reader.drafter_value("target_layer_ids")
    rule = f"expected strictly increasing layer outputs in -1..{depth - 2} (-1 is the embedding's output)"
    if not isinstance(taps, list) or not taps or not all(isinstance(i, int) and not isinstance(i, bool) for i in taps):
        reader.faults.append(f"target_layer_ids is {taps!r:.80}, {rule}")
        return (0,)
    if any(b <= a for a, b in pairwise(taps)):
        reader.faults.append(f"target_layer_ids {taps} is not strictly increasing, {rule}")
    if not reader.known("num_target_layers"):
        return tuple(taps)
    if depth - 1 in taps:
        reader.unsupported.append(
            f"target_layer_ids {taps} taps the last layer {depth - 1}, whose published state is already normed; {rule}"
        )
    elif not all(-1 <= i < depth - 1 for i in taps):
        reader.faults.append(f"target_layer_ids {taps} is out of range, {rule}")
    return tuple(taps)


def _transformer(reader: _Reader) -> dict[str, Any]:
    heads = reader.number("num_attention_heads")
    kv_heads = reader.number("num_key_value_heads", default=heads)
    hidden, layers = reader.number("hidden_size"), reader.number("num_hidden_layers")
    if reader.known("num_attention_heads", "num_key_value_heads") and heads % kv_heads:
        reader.faults.append(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    head_dim = reader.number("head_dim", default=max(1, hidden // heads))
    if head_dim % 2:
        reader.faults.append(f"head_dim is {head_dim}, expected an even number: rotary positions turn pairs")
    if (act := reader.values.get("hidden_act", "silu")) != "silu":
        reader.unsupported.append(f"hidden_act is {act!r}, expected 'silu'")
    _refuse_sliding_windows(reader, layers)
    return {
        "hidden_size": hidden,
        "intermediate_size": reader.number("intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": reader.number("vocab_size"),
        "rms_norm_eps": reader.number("rms_norm_eps", float, minimum=0),
        "rope_theta": _rope_theta(reader),
        "max_position_embeddings": reader.number("max_position_embeddings"),
        "attention_bias": reader.number("attention_bias", bool, default=False),
    }


def _rope_theta(reader: _Reader) -> float:
    """Return theta from `rope_parameters` or the flat key; anything but plain rotary positions is refused by name."""
    theta = reader.values.get("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        rope = reader.values.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            reader.faults.append(f"{key} is {rope!r}, expected an object or null")
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        extra = sorted(set(rope) - {"rope_type", "type", "rope_theta"})
        if kind != "default" or extra:
            reader.unsupported.append(f"{key} {rope} scales rotary positions; expected rope_type 'default' and no other key")
        theta = rope.get("rope_theta", theta)
    if reader.values.get("partial_rotary_factor", 1) != 1:
        reader.unsupported.append(f"partial_rotary_factor is {reader.values['partial_rotary_factor']!r}, expected 1")
    if theta is None:
        reader.faults.append("rope_theta is missing, at the top level and in rope_parameters")
    elif isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta <= _LARGEST:
        reader.faults.append(f"rope_theta is {theta!r:.40}, expected a number above 0")
    else:
        return float(theta)
    return 1.0


def _refuse_sliding_windows(reader: _Reader, layers: int) -> None:
    """Refuse layers with a sliding window. A null, absent or unused window is none; a window of 0 is a fault."""
    values = reader.values
    window, types = values.get("sliding_window"), values.get("layer_types")
    if window is not None and window is not False and (not isinstance(window, int) or window < 1):
        reader.faults.append(f"sliding_window is {window!r:.40}, expected null or at least 1")
    if isinstance(types, list):
        sliding = [t for t in types if t != "full_attention"]
        if len(types) != layers:
            reader.faults.append(f"layer_types has {len(types)} entries for num_hidden_layers {layers}")
    elif types is not None:
        sliding = []
        reader.faults.append(f"layer_types is {types!r:.40}, expected a list")
    else:
        # As transformers derives it: layers from max_window_layers on slide; it defaults to 28 there.
        from_layer = reader.number("max_window_layers", default=_MAX_WINDOW_LAYERS, minimum=0)
        active = bool(values.get("use_sliding_window")) and bool(window) and from_layer < layers
        sliding = ["sliding_attention"] if active else []
    if sliding:
        reader.unsupported.append(f"layer_types holds {sliding[0]!r:.40}; expected full attention in every layer")
