"""Numpy reference of the operators in `plugins.contract`, row by row and in float64: slow, and easy to check by eye.

Knows the contract only. Shape letters as in `plugins.contract`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Index = NDArray[np.integer]


def ring_write(ring: Array, rows: Array, start: Index) -> Array:
    """Return `ring [B,G,R,D]` with `rows [B,G,N,D]` written at slots (start + i) mod R."""
    updated = ring.copy()
    capacity = ring.shape[2]
    for b in range(ring.shape[0]):
        for i in range(rows.shape[2]):
            updated[b, :, (int(start[b]) + i) % capacity] = rows[b, :, i]
    return updated


def visible_slots(total: int, first: int, window: int, capacity: int) -> dict[int, int]:
    """Map each visible ring slot to the position it holds."""
    oldest = max(first, total - window, 0)
    return {p % capacity: p for p in range(max(oldest, total - capacity), total)}


def block_attention(
    query: Array,
    ring_key: Array,
    ring_value: Array,
    block_key: Array,
    block_value: Array,
    total: Index,
    first: Index,
    *,
    scale: float,
    window: int,
) -> Array:
    """Return the attended rows `[B,Hq,T,D]` of a block over the visible ring slots and the block itself."""
    attended = np.empty(query.shape, np.float64)
    group = query.shape[1] // ring_key.shape[1]
    for b in range(query.shape[0]):
        slots = list(visible_slots(int(total[b]), int(first[b]), window, ring_key.shape[2]))
        for head in range(query.shape[1]):
            g = head // group
            keys = np.concatenate([ring_key[b, g, slots], block_key[b, g]])
            values = np.concatenate([ring_value[b, g, slots], block_value[b, g]])
            attended[b, head] = _attend(query[b, head], keys, values, scale)
    return attended


def cached_attention(query: Array, key_cache: Array, value_cache: Array, start: Index, *, scale: float) -> Array:
    """Return the attended rows `[B,Hq,N,D]`: row i sees the cache slots 0..start + i."""
    attended = np.empty(query.shape, np.float64)
    group = query.shape[1] // key_cache.shape[1]
    for b in range(query.shape[0]):
        for head in range(query.shape[1]):
            for i in range(query.shape[2]):
                seen = int(start[b]) + i + 1
                keys, values = key_cache[b, head // group, :seen], value_cache[b, head // group, :seen]
                attended[b, head, i] = _attend(query[b, head, i : i + 1], keys, values, scale)[0]
    return attended


def _attend(query: Array, keys: Array, values: Array, scale: float) -> Array:
    scores = query.astype(np.float64) @ keys.astype(np.float64).T * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended: Array = weights / weights.sum(axis=-1, keepdims=True) @ values.astype(np.float64)
    return attended
