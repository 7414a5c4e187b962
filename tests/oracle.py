"""Independent oracle: Qwen3 target and DSpark drafter in float64 numpy, one request, everything recomputed from the checkpoint.

Shares no code with the exporter or the runtime: it reads config.json and the tensors itself and attends over lists of positions, with no
ring and no cache. B is 1 throughout. H hidden size, D head dimension, V vocabulary rows, m tapped layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

Array = NDArray[np.float64]


def load(directory: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return config.json and all tensors in float64."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "numpy") as handle:
            tensors |= {name: handle.get_tensor(name).astype(np.float64) for name in handle.keys()}  # noqa: SIM118
    assert ml_dtypes.bfloat16  # safetensors' numpy reader needs it registered
    return json.loads((directory / "config.json").read_text()), tensors


def rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def distribution(logits: Array, params: Any) -> Array:
    """Return the probabilities at a temperature, cut by sorting: min_p, then top_k, then top_p of what is left; ties stay together."""
    if params.temperature < 1e-5:
        return np.eye(len(logits))[int(np.flatnonzero(logits == logits.max())[0])]
    p = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    p[p < params.min_p * (1 - 1e-7)] = 0
    if 0 < params.top_k < len(p):
        p[p < np.sort(p)[-params.top_k] * (1 - 1e-7)] = 0
    if params.top_p < 1:
        order = np.sort(p)[::-1]
        p[p < order[np.searchsorted(np.cumsum(order), params.top_p * p.sum())] * (1 - 1e-7)] = 0
    return p / p.sum()


class Layers:
    """The arithmetic of Qwen3 layers, by tensor name prefix."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Array], prefix: str) -> None:
        self.config, self.tensors, self.prefix = config, tensors, prefix
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        rope = config.get("rope_parameters") or config
        self.theta = float(rope["rope_theta"])

    def weight(self, layer: int, name: str) -> Array:
        return self.tensors[f"{self.prefix}layers.{layer}.{name}.weight"]

    def linear(self, x: Array, layer: int, name: str) -> Array:
        bias = self.tensors.get(f"{self.prefix}layers.{layer}.{name}.bias", 0.0)
        return x @ self.weight(layer, name).T + bias

    def rope(self, x: Array, positions: Array) -> Array:
        """Rotate `x [n, heads, D]` at absolute positions `[n]`."""
        half = self.head_dim // 2
        inverse = self.theta ** (-np.arange(half) * 2.0 / self.head_dim)
        angle = np.asarray(positions, np.float64)[:, None, None] * inverse
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    def keys_values(self, y: Array, layer: int, positions: Array) -> tuple[Array, Array]:
        shape = len(y), self.kv_heads, self.head_dim
        key = rmsnorm(self.linear(y, layer, "self_attn.k_proj").reshape(shape), self.weight(layer, "self_attn.k_norm"), self.eps)
        return self.rope(key, positions), self.linear(y, layer, "self_attn.v_proj").reshape(shape)

    def layer(self, x: Array, layer: int, positions: Array, keys: Array, values: Array, seen: NDArray[np.bool_]) -> Array:
        """Return the layer's output for rows `x` that attend to `keys`, `values [k, G, D]` where `seen [n, k]`."""
        y = rmsnorm(x, self.weight(layer, "input_layernorm"), self.eps)
        query = self.linear(y, layer, "self_attn.q_proj").reshape(len(x), self.heads, self.head_dim)
        query = self.rope(rmsnorm(query, self.weight(layer, "self_attn.q_norm"), self.eps), positions)
        out = np.empty_like(query)
        for head in range(self.heads):
            g = head // (self.heads // self.kv_heads)
            scores = query[:, head] @ keys[:, g].T / np.sqrt(self.head_dim)
            out[:, head] = softmax(np.where(seen, scores, -np.inf)) @ values[:, g]
        x = x + self.linear(out.reshape(len(x), -1), layer, "self_attn.o_proj")
        z = rmsnorm(x, self.weight(layer, "post_attention_layernorm"), self.eps)
        gate = self.linear(z, layer, "mlp.gate_proj")
        return x + self.linear(gate * sigmoid(gate) * self.linear(z, layer, "mlp.up_proj"), layer, "mlp.down_proj")


class Target:
    """A Qwen3 target by full recomputation."""

    def __init__(self, directory: Path) -> None:
        self.config, self.tensors = load(directory)
        self.layers = Layers(self.config, self.tensors, "model.")
        embedding = self.tensors["model.embed_tokens.weight"]
        self.head = embedding if self.config["tie_word_embeddings"] else self.tensors["lm_head.weight"]

    def forward(self, tokens: list[int]) -> tuple[Array, list[Array]]:
        """Return logits `[n, V]` and the states `[n, H]`: the embedding's output, then each layer's."""
        positions = np.arange(len(tokens))
        x = self.tensors["model.embed_tokens.weight"][tokens]
        states, causal = [x], positions[:, None] >= positions
        for i in range(self.config["num_hidden_layers"]):
            y = rmsnorm(x, self.layers.weight(i, "input_layernorm"), self.layers.eps)
            x = self.layers.layer(x, i, positions, *self.layers.keys_values(y, i, positions), causal)
            states.append(x)
        return rmsnorm(x, self.tensors["model.norm.weight"], self.layers.eps) @ self.head.T, states

    def taps(self, tokens: list[int], layer_ids: list[int]) -> Array:
        """Return the joined outputs of `layer_ids` (-1: the embedding) for every position, `[n, m*H]`."""
        states = self.forward(tokens)[1]
        return np.concatenate([states[i + 1] for i in layer_ids], -1)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Return the greedy continuation, `count` tokens, by full recomputation of every step."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.forward(tokens)[0][-1].argmax()))
        return tokens[len(prompt) :]


class Drafter:
    """A DSpark drafter over an explicit list of context positions; with `markov_topk` it proposes the likeliest without correction only.

    The other tokens' logits are then -inf.
    """

    def __init__(self, directory: Path, markov_topk: int | None = None) -> None:
        self.markov_topk = markov_topk
        self.config, self.tensors = load(directory)
        self.layers = Layers(self.config, self.tensors, "")

    def context(self, taps: Array, positions: Array) -> list[tuple[Array, Array]]:
        """Return keys and values `[n, G, D]` of each layer for context rows at absolute positions."""
        rows = rmsnorm(np.asarray(taps, np.float64) @ self.tensors["fc.weight"].T, self.tensors["hidden_norm.weight"], self.layers.eps)
        return [self.layers.keys_values(rows, i, positions) for i in range(self.config["num_hidden_layers"])]

    def draft(self, taps: Array, positions: Array, anchor: int, start: int, chain: Sequence[int] = ()) -> dict[str, Array]:
        """Draft a block whose anchor is at `start`, seeing context rows `taps` at `positions` and no others; greedily behind `chain`."""
        block, mask = self.config["block_size"], self.config["mask_token_id"]
        rows = start + np.arange(block)
        x = self.tensors["embed_tokens.weight"][[anchor] + [mask] * (block - 1)]
        for i, (keys, values) in enumerate(self.context(taps, positions)):
            y = rmsnorm(x, self.layers.weight(i, "input_layernorm"), self.layers.eps)
            own_keys, own_values = self.layers.keys_values(y, i, rows)
            keys, values = np.concatenate([keys, own_keys]), np.concatenate([values, own_values])
            x = self.layers.layer(x, i, rows, keys, values, np.ones((block, len(keys)), bool))
        hidden = rmsnorm(x, self.tensors["norm.weight"], self.layers.eps)
        return {"hidden": hidden, **self.walk(hidden, anchor, chain)}

    def windowed(self, taps: Array, total: int, anchor: int, *, window: int, first: int = 0) -> dict[str, Array]:
        """Draft behind `total` committed positions, of which only the newest `window` from `first` on are seen."""
        seen = np.arange(max(first, total - window, 0), total)
        return self.draft(np.asarray(taps)[seen], seen, anchor, total)

    def walk(self, hidden: Array, anchor: int, chain: Sequence[int] = ()) -> dict[str, Array]:
        """Return tokens, corrected logits and confidence logits of the block's rows; `chain` gives the first tokens."""
        t, kind = self.tensors, self.config.get("markov_head_type", "vanilla")
        rank = self.config["markov_rank"]
        tokens, logits, confidence, state = [anchor], [], [], np.zeros(rank)
        for row in hidden:
            own = row @ t["lm_head.weight"].T
            dropped = [] if self.markov_topk is None else np.argsort(-own, kind="stable")[self.markov_topk :]
            embedded = t["markov_head.markov_w1.weight"][tokens[-1]] if rank else None
            if rank:
                mixed = embedded
                if kind == "gated":
                    gate = t["markov_head.gate_proj.weight"] @ np.concatenate([row, embedded]) + t["markov_head.gate_proj.bias"]
                    mixed = sigmoid(gate) * embedded
                if kind == "rnn":
                    joint = t["markov_head.joint_proj.weight"] @ np.concatenate([state, embedded, row])
                    zg, zc, zo = np.split(joint + t["markov_head.joint_proj.bias"], 3)
                    mixed = np.tanh(zo)
                    state = sigmoid(zg) * state + (1 - sigmoid(zg)) * np.tanh(zc)
                own = own + t["markov_head.markov_w2.weight"] @ mixed
            own[dropped] = -np.inf
            if self.config["enable_confidence_head"]:
                features = np.concatenate([row, embedded]) if self.config["confidence_head_with_markov"] else row
                confidence.append(
                    float(t["confidence_head.proj.weight"][0] @ features + t.get("confidence_head.proj.bias", np.zeros(1))[0])
                )
            logits.append(own)
            tokens.append(int(own.argmax()) if len(tokens) > len(chain) else int(chain[len(tokens) - 1]))
        return {"tokens": np.array(tokens[1:]), "logits": np.array(logits), "confidence_logits": np.array(confidence)}
