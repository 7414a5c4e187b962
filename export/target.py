"""The Qwen3 target in torch: one step over new rows with a ragged key/value cache, logits of chosen rows, and taps.

Parameter names are those of Qwen3ForCausalLM without the leading `model.`. The step is split in stages (embed, one layer, head)
so that the exporter traces one layer, not all of them. B batch rows, N new rows, M logit rows, S cache capacity, H hidden size,
Q = N x query heads per key/value head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.export.layers import DecoderLayer, Linear, RMSNorm, RotaryPositions
from dspark.export.ops import cache_write, cached_attention
from dspark.runtime.config import TargetConfig


class TargetLayer(DecoderLayer):
    """A Qwen3 layer whose row i attends to the cache up to its own position."""

    def write(
        self, key_cache: Tensor, value_cache: Tensor, x: Tensor, start: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normed rows `[B,N,H]` of `x` and the two caches with the new rows written."""
        normed, attention = self.input_layernorm(x), self.self_attn
        rows = normed.flatten(0, 1)
        key_cache = cache_write(key_cache, attention.key(rows, cos, sin), start)
        return normed, key_cache, cache_write(value_cache, attention.value(rows, cos), start)

    def attend(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        x: Tensor,
        normed: Tensor,
        visible: Tensor,
        start: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Return the layer's output `[B,N,H]`."""
        query = self.self_attn.query(normed.flatten(0, 1), cos, sin)
        attended = cached_attention(query, key_cache, value_cache, start, visible, scale=self.self_attn.scale)
        return self.add_output(x, attended, cos)


class Target(nn.Module):
    """Qwen3ForCausalLM with taps at `tap_layers` (outputs of these layers; -1 is the embedding's output)."""

    def __init__(self, config: TargetConfig, tap_layers: tuple[int, ...]) -> None:
        super().__init__()
        self.tap_layers = tap_layers
        self.queries_per_head = config.num_attention_heads // config.num_key_value_heads
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TargetLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = RotaryPositions(config.head_dim, config.rope_theta)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def embed(self, tokens: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the embedded rows `[B,N,H]` and the angles of their positions."""
        x = self.embed_tokens(tokens)
        positions = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return (x, *self.rotary(positions, x.dtype))

    def visible(self, key_cache: Tensor, start: Tensor, cos: Tensor) -> Tensor:
        """Return which cache slots each stacked query row sees, `[B,1,Q,S]`: the same for all layers, so computed once."""
        rows = start[:, None] + torch.arange(cos.shape[1], device=start.device)
        slots = torch.arange(key_cache.shape[2], device=start.device)
        return (slots <= rows.repeat(1, self.queries_per_head)[:, :, None])[:, None]

    def head(self, x: Tensor, logit_rows: Tensor, *tapped: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 logits `[B,M,V]` of the rows `logit_rows [B,M]` of `x`, and the joined taps `[B,N,m*H]`."""
        batch = torch.arange(x.shape[0], device=x.device)[:, None]
        chosen = x.flatten(0, 1)[(batch * x.shape[1] + logit_rows).flatten()]
        logits = self.lm_head(self.norm(chosen)).float()
        return logits.view(*logit_rows.shape, -1), torch.cat(tapped, -1)

    def forward(self, tokens: Tensor, start: Tensor, logit_rows: Tensor, caches: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Run one step; `caches` holds key and value of each layer in turn. Returns logits, taps and the new caches."""
        x, cos, sin = self.embed(tokens, start)
        outputs, updated = {-1: x}, []
        for i, layer in enumerate(self.layers):
            normed, *written = layer.write(caches[2 * i], caches[2 * i + 1], x, start, cos, sin)
            if i == 0:
                visible = self.visible(written[0], start, cos)
            x = layer.attend(*written, x, normed, visible, start, cos, sin)
            outputs[i] = x
            updated += written
        logits, taps = self.head(x, logit_rows, *(outputs[i] for i in self.tap_layers))
        return logits, taps, updated
