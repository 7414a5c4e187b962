"""Parts that a Qwen3 target layer and a DSpark drafter layer share: norm, linear, rotary positions, projections, MLP.

Knows tensors only; parameter names are those of the Hugging Face checkpoints. Float32 where the numerics of the family ask for it:
norm statistics and rotary angles. H hidden size, B batch rows, N rows, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.runtime.config import TransformerConfig


class RMSNorm(nn.Module):
    """Normalise in float32, cast back, then multiply by the weight (Qwen3's order of casts)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if torch.onnx.is_in_onnx_export():
            attributes = {"axis": -1, "epsilon": self.eps, "stash_type": 1}
            return torch.onnx.ops.symbolic("::RMSNormalization", (x, self.weight.to(x.dtype)), attributes, dtype=x.dtype, shape=x.shape)
        f = x.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * f.to(x.dtype)


class Linear(nn.Linear):
    """A linear layer over rows `[rows, in]` whose ONNX form is Gemm on the stored [out, in] weight.

    torch's own export is MatMul on a transposed weight, which ONNX Runtime transposes into a second copy at load
    (2.1 s against 0.6 s for a 151936 x 1024 head).
    """

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return `x [rows, in]` times the weight, plus the bias, computed in `dtype` (default: that of `x`)."""
        dtype = dtype or x.dtype
        x, weight = x.to(dtype), self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        if not torch.onnx.is_in_onnx_export():
            return F.linear(x, weight, bias)
        inputs = (x, weight) if bias is None else (x, weight, bias)
        shape = (x.shape[0], self.out_features)
        return torch.onnx.ops.symbolic("::Gemm", inputs, {"transB": 1}, dtype=dtype, shape=shape)


class RotaryPositions(nn.Module):
    """cos and sin of the rotary angles at absolute positions, computed in float32 for any position."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(head_dim, theta), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[B,N,D/2]` of `positions [B,N]`."""
        angles = positions[..., None].float() * self.inv_freq
        return angles.cos().to(dtype), angles.sin().to(dtype)


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return theta ** (-2j / D) for j < D / 2, rounded as transformers rounds it."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x [B,heads,N,D]` by the angles of its rows: halves layout, all D dimensions."""
    if torch.onnx.is_in_onnx_export():
        return torch.onnx.ops.symbolic("::RotaryEmbedding", (x, cos, sin), {"interleaved": 0}, dtype=x.dtype, shape=x.shape)
    cos, sin = cos[:, None], sin[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class AttentionProjections(nn.Module):
    """Query, key, value and output projections of one layer, with the per-head norms of query and key.

    B and N are read from `cos`, which all layers share.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden, bias, self.head_dim = config.hidden_size, config.attention_bias, config.head_dim
        query_size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = Linear(hidden, query_size, bias=bias)
        self.k_proj = Linear(hidden, kv_size, bias=bias)
        self.v_proj = Linear(hidden, kv_size, bias=bias)
        self.o_proj = Linear(query_size, hidden, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    @property
    def scale(self) -> float:
        """Attention scale: head_dim ** -0.5, whatever the hidden size."""
        return self.head_dim**-0.5

    def query(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the queries `[B,Hq,N,D]` of `rows [B*N,H]` at the angles `[B,N,D/2]`."""
        return rotate(self.q_norm(self._heads(self.q_proj(rows), cos)).transpose(1, 2), cos, sin)

    def key(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the keys `[B,G,N,D]` of `rows [B*N,H]` at the angles `[B,N,D/2]`."""
        return rotate(self.k_norm(self._heads(self.k_proj(rows), cos)).transpose(1, 2), cos, sin)

    def value(self, rows: Tensor, cos: Tensor) -> Tensor:
        """Return the values `[B,G,N,D]` of `rows [B*N,H]`: no norm, no rotation."""
        return self._heads(self.v_proj(rows), cos).transpose(1, 2)

    def output(self, attended: Tensor) -> Tensor:
        """Return the attention output `[B*N,H]` of `attended [B,Hq,N,D]`."""
        return self.o_proj(attended.transpose(1, 2).reshape(-1, self.o_proj.in_features))

    def _heads(self, projected: Tensor, cos: Tensor) -> Tensor:
        return projected.view(cos.shape[0], cos.shape[1], -1, self.head_dim)


class MLP(nn.Module):
    """SiLU-gated feed-forward layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm residual layer; subclasses say what the queries attend to."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attn = AttentionProjections(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def add_output(self, x: Tensor, attended: Tensor, cos: Tensor) -> Tensor:
        """Add the attention output, then the MLP's, to the residual stream `x [B,N,H]`."""
        rows = x.flatten(0, 1) + self.self_attn.output(attended)
        rows = rows + self.mlp(self.post_attention_layernorm(rows))
        return rows.view(cos.shape[0], cos.shape[1], -1)
