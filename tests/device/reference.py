"""The operators in torch and float64, written from their rules in `dspark.plugins.contract`; no code is shared with the kernels.

B requests   G key/value heads   Hq query heads   N rows   T block rows   R ring capacity   D head dimension
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


def ring_write(ring: torch.Tensor, rows: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return `ring [B,G,R,D]` with `rows [B,G,N,D]` in the slots (start + i) mod R."""
    slots = (start[:, None] + torch.arange(rows.shape[2], device=ring.device)) % ring.shape[2]
    return ring.scatter(2, slots[:, None, :, None].expand_as(rows), rows)


def visible(total: torch.Tensor, first: torch.Tensor, window: int, capacity: int) -> torch.Tensor:
    """Return which slots `[B,R]` are seen: slot c holds the largest p < total with p mod R = c."""
    slots = torch.arange(capacity, device=total.device)
    position = total[:, None] - 1 - (total[:, None] - 1 - slots) % capacity
    oldest = torch.maximum(first, total - window).clamp(min=0)
    return position >= oldest[:, None]


def block_attention(tensors: Mapping[str, torch.Tensor], scale: float, window: int) -> torch.Tensor:
    """Return what the operator gives, `[B,Hq,T,D]` in float64; values of hidden slots do not matter."""
    query, ring_key = tensors["query"], tensors["ring_key"]
    seen = visible(tensors["total"], tensors["first"], window, ring_key.shape[2])

    def rows(ring: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        kept = torch.where(seen[:, None, :, None], ring.double(), 0.0)
        return torch.cat([kept, block.double()], 2).repeat_interleave(query.shape[1] // ring.shape[1], 1)

    scores = query.double() @ rows(ring_key, tensors["block_key"]).mT * scale
    scores[..., : seen.shape[1]].masked_fill_(~seen[:, None, None, :], -torch.inf)
    return scores.softmax(-1) @ rows(tensors["ring_value"], tensors["block_value"])
