"""Inputs for the kernels and what they must give, in every dtype: values that the dtype holds exactly, expected results in float64.

B requests   G key/value heads   Hq query heads   N rows   T block rows   R ring capacity   D head dimension
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from dspark.plugins import kernels, reference

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of rounding a result to the dtype."""


@dataclass(frozen=True)
class Attention:
    """One call of block attention. `totals` and `firsts` repeat over the batch."""

    dtype: str = "float32"
    batch: int = 4
    heads: int = 4
    kv_heads: int = 2
    block: int = 7
    capacity: int = 48
    head_dim: int = 64
    window: int = 40
    multiprocessors: int = 1
    totals: Sequence[int] = (0, 20, 48, 149)
    firsts: Sequence[int] = (0, 0, 3, 130)

    @property
    def shape(self) -> kernels.AttentionShape:
        sizes = (self.batch, self.heads, self.kv_heads, self.block, self.capacity, self.head_dim, self.window)
        return kernels.AttentionShape(self.dtype, *sizes)

    def launches(self) -> tuple[kernels.Launch, ...]:
        return kernels.block_attention(self.shape, self.head_dim**-0.5, self.multiprocessors)

    def arrays(self) -> dict[str, np.ndarray]:
        """Inputs, with NaN in every hidden slot; outputs and workspace filled with NaN."""
        rng = np.random.default_rng(self.head_dim)
        total = np.resize(np.array(self.totals, np.int64), self.batch)
        first = np.resize(np.array(self.firsts, np.int64), self.batch)

        def random(heads: int, rows: int) -> np.ndarray:
            return rng.standard_normal((self.batch, heads, rows, self.head_dim)).astype(DTYPES[self.dtype])

        ring_key, ring_value = random(self.kv_heads, self.capacity), random(self.kv_heads, self.capacity)
        for b in range(self.batch):
            visible = reference.visible_slots(int(total[b]), int(first[b]), self.window, self.capacity)
            hidden = sorted(set(range(self.capacity)) - set(visible))
            ring_key[b, :, hidden] = ring_value[b, :, hidden] = np.nan
        workspace = kernels.block_attention_workspace(self.shape, self.multiprocessors)
        return {
            "query": random(self.heads, self.block),
            "ring_key": ring_key,
            "ring_value": ring_value,
            "block_key": random(self.kv_heads, self.block),
            "block_value": random(self.kv_heads, self.block),
            "total": total,
            "first": first,
            "attended": np.full((self.batch, self.heads, self.block, self.head_dim), np.nan, DTYPES[self.dtype]),
            "workspace": np.full(workspace // 4, np.nan, np.float32),
        }

    def check(self, arrays: dict[str, np.ndarray]) -> None:
        """Raise AssertionError unless `attended` is what float64 gives, rounded: the float32 arithmetic may cost 3e-6 more."""
        inputs = [arrays[name] for name in ("query", "ring_key", "ring_value", "block_key", "block_value", "total", "first")]
        expected = reference.block_attention(*inputs, scale=self.head_dim**-0.5, window=self.window)
        attended = arrays["attended"].astype(np.float64)
        np.testing.assert_allclose(attended, expected, rtol=1.01 * HALF_ULP[self.dtype], atol=3e-6)


@dataclass(frozen=True)
class Write:
    """One call of the ring write, in place. `starts` repeat over the batch."""

    dtype: str = "float32"
    batch: int = 3
    heads: int = 2
    capacity: int = 16
    rows: int = 5
    head_dim: int = 64
    starts: Sequence[int] = (0, 13, 2**33 + 15)

    def launches(self) -> tuple[kernels.Launch, ...]:
        return (kernels.ring_write(self.dtype, self.batch, self.heads, self.capacity, self.rows, self.head_dim),)

    def arrays(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.head_dim)

        def random(rows: int) -> np.ndarray:
            return rng.standard_normal((self.batch, self.heads, rows, self.head_dim)).astype(DTYPES[self.dtype])

        start = np.resize(np.array(self.starts, np.int64), self.batch)
        return {"updated": random(self.capacity), "rows": random(self.rows), "start": start}

    def check(self, arrays: dict[str, np.ndarray]) -> None:
        """Raise AssertionError unless the rows are in their slots and every other slot is as it was."""
        before = self.arrays()
        expected = reference.ring_write(before["updated"], before["rows"], before["start"])
        np.testing.assert_array_equal(arrays["updated"].view("u1"), expected.view("u1"))
