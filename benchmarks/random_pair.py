"""Write a target and a drafter of any shape with random weights, in the published checkpoint formats.

`python benchmarks/random_pair.py 0.6b DIR` writes DIR/target and DIR/drafter. With `sparse` the weight files are holes: they take no
disk and read as zeros, which is enough to measure an export. Needs numpy and ml_dtypes only.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "bf16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "fp16": ("F16", np.dtype(np.float16)),
    "fp32": ("F32", np.dtype(np.float32)),
}
MASK_TOKEN_ID = 151669
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Shape:
    """Sizes of a pair, in the order of the published configs."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    taps: tuple[int, ...]
    vocabulary: int = 151936
    drafter_layers: int = 5
    block: int = 7
    rank: int = 256
    theta: float = 1e6
    positions: int = 40960
    mask: int = MASK_TOKEN_ID


SHAPES = {
    "pair": Shape(192, 512, 8, 4, 2, 64, True, (1, 4, 6), 2048, drafter_layers=2, rank=64, theta=1e4, positions=16384, mask=2040),
    "0.6b": Shape(1024, 3072, 28, 16, 8, 128, True, (1, 7, 14, 21, 25)),
    "1.7b": Shape(2048, 6144, 28, 16, 8, 128, True, (1, 7, 14, 21, 25)),
    "4b": Shape(2560, 9728, 36, 32, 8, 128, True, (1, 9, 17, 25, 33)),
    "8b": Shape(4096, 12288, 36, 32, 8, 128, False, (1, 9, 17, 25, 33)),
    "14b": Shape(5120, 17408, 40, 40, 8, 128, False, (1, 10, 19, 28, 37)),
}
"""Qwen3 shapes (the drafters of 4b, 8b and 14b are the published ones, others follow them); the example pair's with a longer limit."""


def target_config(shape: Shape) -> dict[str, Any]:
    """Return the config.json of a target."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": shape.theta, "rope_type": "default"},
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "hidden_act": "silu",
    }


def drafter_config(shape: Shape) -> dict[str, Any]:
    """Return the config.json of a drafter."""
    return target_config(shape) | {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": shape.drafter_layers,
        "num_target_layers": shape.layers,
        "tie_word_embeddings": False,
        "block_size": shape.block,
        "mask_token_id": shape.mask,
        "target_layer_ids": list(shape.taps),
        "markov_rank": shape.rank,
        **({"markov_head_type": "vanilla"} if shape.rank else {}),
        "enable_confidence_head": True,
        "confidence_head_with_markov": bool(shape.rank),
    }


def layer_tensors(shape: Shape, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the tensors of one Qwen3 layer."""
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
        "self_attn.q_proj": (q, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "mlp.gate_proj": (shape.intermediate, h),
        "mlp.up_proj": (shape.intermediate, h),
        "mlp.down_proj": (h, shape.intermediate),
    }
    return {f"{prefix}{name}.weight": size for name, size in sizes.items()}


def target_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return name and shape of a target's tensors."""
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        tensors |= layer_tensors(shape, f"model.layers.{layer}.")
    tensors["model.norm.weight"] = (shape.hidden,)
    return tensors if shape.tied else tensors | {"lm_head.weight": (shape.vocabulary, shape.hidden)}


def drafter_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return name and shape of a drafter's tensors."""
    tensors: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (shape.vocabulary, shape.hidden),
        "lm_head.weight": (shape.vocabulary, shape.hidden),
        "fc.weight": (shape.hidden, len(shape.taps) * shape.hidden),
        "hidden_norm.weight": (shape.hidden,),
        "norm.weight": (shape.hidden,),
        "confidence_head.proj.weight": (1, shape.hidden + shape.rank),
        "confidence_head.proj.bias": (1,),
    }
    for layer in range(shape.drafter_layers):
        tensors |= layer_tensors(shape, f"layers.{layer}.")
    if shape.rank:
        tensors |= {f"markov_head.markov_w{i}.weight": (shape.vocabulary, shape.rank) for i in (1, 2)}
    return tensors


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    *,
    dtype: str = "bf16",
    seed: int = 0,
    shards: int = 1,
    sparse: bool = False,
    deviation: float = 0.02,
) -> None:
    """Write a model directory. Weights are normal with that deviation (norms: 1 plus that), the same for equal arguments."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2))
    names = list(tensors)
    parts = [names[i::shards] for i in range(shards)]
    files = ["model.safetensors"] if shards == 1 else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for number, (file, part) in enumerate(zip(files, parts, strict=True)):
        own = {name: tensors[name] for name in part}
        _write_safetensors(directory / file, own, dtype, None if sparse else np.random.default_rng([seed, number]), deviation)
    if shards > 1:
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_pair(directory: Path, shape: Shape, *, shards: int = 1, **options: Any) -> None:
    """Write `directory`/target (in `shards` files) and `directory`/drafter; `options` as for `write_checkpoint`."""
    write_checkpoint(directory / "target", target_config(shape), target_tensors(shape), seed=1, shards=shards, **options)
    write_checkpoint(directory / "drafter", drafter_config(shape), drafter_tensors(shape), seed=2, **options)


def _write_safetensors(
    path: Path, tensors: Mapping[str, tuple[int, ...]], dtype: str, rng: np.random.Generator | None, deviation: float
) -> None:
    name, numpy_dtype = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor, shape in tensors.items():
        begin, end = end, end + numpy_dtype.itemsize * int(np.prod(shape))
        header[tensor] = {"dtype": name, "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(raw)) + raw)
        if rng is None:
            out.truncate(8 + len(raw) + end)
            return
        for tensor, shape in tensors.items():
            left = int(np.prod(shape))
            while left:
                values = rng.standard_normal(min(left, _CHUNK), np.float32) * np.float32(deviation) + np.float32("norm" in tensor)
                out.write(values.astype(numpy_dtype).tobytes())
                left -= values.size


def main() -> None:
    """Write the pair that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--sparse", action="store_true", help="holes instead of random values")
    args = parser.parse_args()
    write_pair(args.directory, SHAPES[args.shape], dtype=args.dtype, sparse=args.sparse)


if __name__ == "__main__":
    main()
