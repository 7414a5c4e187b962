"""The graphs of a bundle: names, inputs, outputs, shapes and aliases, declared once for exporter and runtime.

Knows names and shapes. Does not know how a graph is computed or run.

B rows of the bound slot range   N new rows   M logit rows   T block rows   K proposals served   R ring capacity
S cache capacity   G key/value heads   D head dimension   V vocabulary rows   m tapped layers   H hidden size
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.runtime.config import DrafterConfig, TargetConfig

CONTEXT, DRAFT, TARGET, ACCEPT = "context", "draft", "target", "accept"
GRAPHS = (CONTEXT, DRAFT, TARGET, ACCEPT)

MODEL_DTYPE = "model"
"""Stands for the dtype that a bundle was exported with."""


@dataclass(frozen=True)
class TensorSpec:
    """A named tensor; a letter in `shape` is a size chosen at run time."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of one graph in order; `aliases` maps an output to the input whose memory it shares."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: dict[str, str] = field(default_factory=dict)


def state_names(kind: str, layers: int) -> list[tuple[str, str]]:
    """Input and output names of the state tensors: `kind` is `ring` or `cache`; key and value of each layer in turn."""
    names = [f"{part}_{kind}.{layer}" for layer in range(layers) for part in ("key", "value")]
    return [(name, name + ".updated") for name in names]


def _int(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, "int64", shape)


def _float(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, "float32", shape)


def _with_state(
    inputs: list[TensorSpec], outputs: list[TensorSpec], names: list[tuple[str, str]], shape: tuple[int | str, ...]
) -> Signature:
    return Signature(
        (*inputs, *(TensorSpec(name, MODEL_DTYPE, shape) for name, _ in names)),
        (*outputs, *(TensorSpec(name, MODEL_DTYPE, shape) for _, name in names)),
        {updated: name for name, updated in names},
    )


def signatures(target: TargetConfig, drafter: DrafterConfig, num_speculative_tokens: int, *, debug_outputs: bool) -> dict[str, Signature]:
    """Return the signature of every graph of a pair that serves `num_speculative_tokens` (K) proposals a round."""
    k, block, vocabulary = num_speculative_tokens, drafter.block_size, drafter.vocab_size
    taps = TensorSpec("taps", MODEL_DTYPE, ("B", "N", drafter.taps_width))
    ring = ("B", drafter.num_key_value_heads, "R", drafter.head_dim)
    rings = state_names("ring", drafter.num_hidden_layers)
    cache = ("B", target.num_key_value_heads, "S", target.head_dim)
    caches = state_names("cache", target.num_hidden_layers)

    drafted = [_int("verify_tokens", "B", k + 1)]
    if drafter.enable_confidence_head:
        drafted.append(_float("confidence_logits", "B", k))
    if debug_outputs:
        drafted += [
            TensorSpec("block_hidden", MODEL_DTYPE, ("B", block, drafter.hidden_size)),
            _float("draft_logits", "B", k, vocabulary),
        ]
    return {
        CONTEXT: _with_state([taps, _int("start", "B")], [], rings, ring),
        DRAFT: _with_state([taps, _int("start", "B"), _int("total", "B"), _int("first", "B"), _int("anchor", "B")], drafted, rings, ring),
        TARGET: _with_state(
            [_int("tokens", "B", "N"), _int("start", "B"), _int("logit_rows", "B", "M")],
            [_float("logits", "B", "M", vocabulary), taps],
            caches,
            cache,
        ),
        ACCEPT: Signature(
            (_float("logits", "B", "M", vocabulary), _int("verify_tokens", "B", k + 1), _int("count", "B")),
            (_int("accepted", "B"), _int("next_token", "B")),
        ),
    }


def round_up_16(size: int) -> int:
    """Round a capacity up to a multiple of 16 rows."""
    return -(-size // 16) * 16


def ring_capacity(window: int, num_speculative_tokens: int) -> int:
    """R: the window, and K + 1 rows so that junk rows of a round never overwrite a visible one."""
    return round_up_16(window + num_speculative_tokens + 1)


def cache_capacity(max_seq_len: int, num_speculative_tokens: int) -> int:
    """S: the longest sequence, and K + 1 rows for the junk rows of a round."""
    return round_up_16(max_seq_len + num_speculative_tokens + 1)
