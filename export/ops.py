"""dspark's operators in torch: opaque nodes while exporting, plain torch code otherwise.

Knows the two forms of each operator. Does not know the ONNX function bodies (export.functions).
Shape letters as in plugins.contract.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.plugins.contract import BLOCK_ATTENTION, CACHED_ATTENTION, PLUGIN_ATTRIBUTES, RING_WRITE, Operator


def _node(operator: Operator, inputs: tuple[Tensor, ...], like: Tensor, **attributes: float | int) -> Tensor:
    assert list(attributes) == list(operator.attributes)
    extra = PLUGIN_ATTRIBUTES if operator.plugin else {}
    return torch.onnx.ops.symbolic(operator.qualified_name, inputs, {**attributes, **extra}, dtype=like.dtype, shape=like.shape, version=1)


def _sizes(query: Tensor, keys: Tensor) -> dict[str, int]:
    return {"heads": int(query.shape[1]), "kv_heads": int(keys.shape[1]), "head_dim": int(query.shape[3])}


def ring_write(ring: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """Write `rows [B,G,N,D]` at slots (start + i) mod R of `ring [B,G,R,D]`."""
    if torch.onnx.is_in_onnx_export():
        return _node(RING_WRITE, (ring, rows, start), ring)
    slots = (start[:, None] + torch.arange(rows.shape[2], device=start.device)) % ring.shape[2]
    return ring.scatter(2, slots[:, None, :, None].expand(rows.shape), rows)


def cache_write(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """Write `rows [B,G,N,D]` at slots start + i of `cache [B,G,S,D]`: the standard TensorScatter, linear."""
    if torch.onnx.is_in_onnx_export():
        return torch.onnx.ops.symbolic(
            "::TensorScatter",
            (cache, rows, start),
            {"axis": 2, "mode": "linear"},
            dtype=cache.dtype,
            shape=cache.shape,
        )
    slots = start[:, None] + torch.arange(rows.shape[2], device=start.device)
    return cache.scatter(2, slots[:, None, :, None].expand(rows.shape), rows)


def block_attention(
    query: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    total: Tensor,
    first: Tensor,
    *,
    scale: float,
    window: int,
) -> Tensor:
    """Attend from `query [B,Hq,T,D]` to the visible ring slots and, both ways, to the block; see the contract."""
    if torch.onnx.is_in_onnx_export():
        inputs = (query, ring_key, ring_value, block_key, block_value, total, first)
        return _node(BLOCK_ATTENTION, inputs, query, scale=scale, window=window, **_sizes(query, ring_key))
    capacity = ring_key.shape[2]
    newest = total[:, None] - 1
    position = newest - torch.remainder(newest - torch.arange(capacity, device=total.device), capacity)
    visible = position >= torch.maximum(first, total - window).clamp(min=0)[:, None]
    visible = torch.cat([visible, visible.new_ones(total.shape[0], block_key.shape[2])], dim=1)
    keys, values = torch.cat([ring_key, block_key], 2), torch.cat([ring_value, block_value], 2)
    return _masked_attention(query, keys, values, visible[:, None, None], scale)


def cached_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, start: Tensor, visible: Tensor, *, scale: float) -> Tensor:
    """Attend from row i of `query [B,Hq,N,D]` to cache slots 0..start + i, which `visible [B,1,Q,S]` spells out."""
    if torch.onnx.is_in_onnx_export():
        inputs = (query, key_cache, value_cache, start, visible)
        return _node(CACHED_ATTENTION, inputs, query, scale=scale, **_sizes(query, key_cache))
    by_row = visible[:, :, : query.shape[2]]  # the rows repeat for each query head of a key/value head
    return _masked_attention(query, key_cache, value_cache, by_row, scale)


def _masked_attention(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = (query * scale @ keys.mT).float().masked_fill(~visible, float("-inf"))
    return scores.softmax(-1).to(query.dtype) @ values
