"""What the runtime must know of the two models: dimensions and conventions, free of any checkpoint layout.

Parsing a Hugging Face config.json into these classes is `export.configs`. They are stored in the bundle's manifest as they are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransformerConfig:
    """Dimensions of a stack of Qwen3 decoder layers."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    attention_bias: bool


@dataclass(frozen=True)
class TargetConfig(TransformerConfig):
    """A Qwen3 target."""

    tie_word_embeddings: bool


@dataclass(frozen=True)
class DrafterConfig(TransformerConfig):
    """A DSpark drafter; names as in its config.json (dspark-spec: the checkpoint format of DeepSpec)."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_rank: int
    markov_head_type: str
    """`vanilla`, `gated`, `rnn`, or `none` when the rank is 0."""
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    confidence_head_bias: bool = True

    @property
    def taps_width(self) -> int:
        """Width of one row of tapped target states: number of taps times hidden size."""
        return len(self.target_layer_ids) * self.hidden_size
