"""The graphs of a bundle: names, inputs, outputs, shapes and aliases, declared once for exporter and runtime.

Knows names and shapes. Does not know how a graph is computed or run.

B rows of the bound slot range   N new rows   M logit rows   T block rows   K proposals served   R ring capacity
S cache capacity   G key/value heads   D head dimension   V vocabulary rows   m tapped layers   H hidden size
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.runtime.config import DrafterConfig, TargetConfig

CONTEXT, DRAFT, TARGET, ACCEPT = "context", "draft", "target", "accept"
DRAFT_SAMPLED, ACCEPT_SAMPLED, TRUNCATE, LOGPROBS = "draft_sampled", "accept_sampled", "truncate", "logprobs"
GREEDY_GRAPHS = (CONTEXT, DRAFT, TARGET, ACCEPT)
GRAPHS = (*GREEDY_GRAPHS, DRAFT_SAMPLED, ACCEPT_SAMPLED, TRUNCATE, LOGPROBS)

MOST_LOGPROBS = 20
"""Most likely tokens whose log-probabilities the graph `logprobs` gives for every row."""

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
    debug = []
    if debug_outputs:
        debug = [TensorSpec("block_hidden", MODEL_DTYPE, ("B", block, drafter.hidden_size)), _float("draft_logits", "B", k, vocabulary)]
    block_inputs = [taps, _int("start", "B"), _int("total", "B"), _int("first", "B"), _int("anchor", "B")]
    drawn, probs = [_float("temperature", "B"), _float("draft_uniform", "B", k)], _float("draft_probs", "B", k, vocabulary)
    return {
        CONTEXT: _with_state([taps, _int("start", "B")], [], rings, ring),
        DRAFT: _with_state(block_inputs, [*drafted, *debug], rings, ring),
        DRAFT_SAMPLED: _with_state([*block_inputs, *drawn], [*drafted, probs, *debug], rings, ring),
        TARGET: _with_state(
            [_int("tokens", "B", "N"), _int("start", "B"), _int("logit_rows", "B", "M")],
            [_float("logits", "B", "M", vocabulary), taps],
            caches,
            cache,
        ),
        **acceptance_signatures(vocabulary, k),
    }


def acceptance_signatures(vocabulary: int, num_speculative_tokens: int) -> dict[str, Signature]:
    """Return the signatures of the graphs without weights, which choose tokens from logits."""
    k = num_speculative_tokens
    logits, verify_tokens, threshold = (
        _float("logits", "B", "M", vocabulary),
        _int("verify_tokens", "B", k + 1),
        _float("threshold", "B", "M"),
    )
    judged, temperature = (logits, verify_tokens, _int("count", "B")), _float("temperature", "B")
    chosen = _int("accepted", "B"), _int("next_token", "B")
    uniform = _float("accept_uniform", "B", k), _float("next_uniform", "B")
    top = min(MOST_LOGPROBS, vocabulary)
    return {
        ACCEPT: Signature(judged, chosen),
        ACCEPT_SAMPLED: Signature((*judged, _float("draft_probs", "B", k, vocabulary), temperature, threshold, *uniform), chosen),
        TRUNCATE: Signature((logits, temperature, _int("top_k", "B"), _float("top_p", "B"), _float("min_p", "B")), (threshold,)),
        LOGPROBS: Signature(
            (logits, verify_tokens, *chosen),
            (_float("logprobs", "B", "M"), _float("top_logprobs", "B", "M", top), _int("top_tokens", "B", "M", top)),
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
