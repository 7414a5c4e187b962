"""Section: the kernels on the card against torch in float64, an error table by dtype and head dimension.

Covers every dtype and head dimension, all heights of query tiles, rings before, at and far behind their first wrap, holes, ragged
requests, one piece of keys and several. Hidden slots hold NaN. B requests; other letters as in `device.reference`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from device import driver, operators, reference
from device.operators import DTYPES
from device.sections import Failed

from dspark.plugins.kernels import HEAD_DIMS

HALF_ULP = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of rounding a result to the dtype."""

SLACK = 1e-5
"""What float32 arithmetic may add: the emulated kernels stay below 3e-6, a device's exp2 and contractions add some. A wrong row of
2048 is two orders of magnitude above it."""

RINGS = {"total": (0, 1, 100, 255, 272, 1000, 2**33 + 3), "first": (0, 0, 0, 40, 3, 900, 0)}
"""Empty, one row, partly filled, with a hole in front, exactly full, wrapped with a hole, positions past 2**32."""


@dataclass(frozen=True)
class Case:
    """One call of block attention; `total` and `first` repeat over the batch."""

    dtype: str
    head_dim: int
    heads: int = 8
    kv_heads: int = 2
    batch: int = 7
    block: int = 7
    capacity: int = 272
    window: int = 256
    total: tuple[int, ...] = RINGS["total"]
    first: tuple[int, ...] = RINGS["first"]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        """Return random inputs and an output of NaN."""
        made = torch.Generator(device).manual_seed(self.head_dim)

        def random(heads: int, rows: int) -> torch.Tensor:
            values = torch.randn(self.batch, heads, rows, self.head_dim, generator=made, device=device)
            return values.to(DTYPES[self.dtype])

        def repeated(values: tuple[int, ...]) -> torch.Tensor:
            return torch.tensor([values[b % len(values)] for b in range(self.batch)], device=device)

        tensors = {
            "query": random(self.heads, self.block),
            "ring_key": random(self.kv_heads, self.capacity),
            "ring_value": random(self.kv_heads, self.capacity),
            "block_key": random(self.kv_heads, self.block),
            "block_value": random(self.kv_heads, self.block),
            "total": repeated(self.total),
            "first": repeated(self.first),
        }
        hidden = ~reference.visible(tensors["total"], tensors["first"], self.window, self.capacity)
        for name in ("ring_key", "ring_value"):
            tensors[name].masked_fill_(hidden[:, None, :, None], torch.nan)
        return tensors | {"attended": torch.full_like(tensors["query"], torch.nan)}


def cases() -> Iterator[Case]:
    """Every dtype and head dimension with 7, 28, 35 and 56 query rows a key/value head; several tiles; long rings, split and not."""
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for heads, kv_heads in ((2, 2), (8, 2), (10, 2), (16, 2)):
                yield Case(dtype, head_dim, heads, kv_heads)
        yield Case(dtype, 128, heads=16, kv_heads=1, block=16)
        yield Case(dtype, 64, block=1, window=3, capacity=5, total=(4, 2**33 + 3), first=(0,))
        for batch in (1, 24):
            yield Case(dtype, 128, 32, 8, batch, 7, 2064, 2048, total=(5000, 2064, 300), first=(0, 100, 0))


def errors(case: Case, device: str) -> tuple[float, float]:
    """Run a case; return the largest error and the largest share of what the dtype allows."""
    tensors, scale = case.tensors(device), case.head_dim**-0.5
    operators.block_attention(tensors, scale, case.window)()
    expected = reference.block_attention(tensors, scale, case.window)
    error = (tensors["attended"].double() - expected).abs().nan_to_num(torch.inf)
    allowed = 1.01 * HALF_ULP[case.dtype] * expected.abs() + SLACK
    return error.max().item(), (error / allowed).max().item()


def compare(chosen: Iterable[Case], device: str) -> list[str]:
    """Run cases and print a line for each dtype and head dimension; return what exceeds its limit."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    faults = []
    for case in chosen:
        error, share = errors(case, device)
        found.setdefault((case.dtype, case.head_dim), []).append((error, share))
        if not share <= 1:
            faults.append(f"{case}: error {error:.2e}, {share:.2f} of the limit")
    print("dtype  head_dim  cases  largest error  of the limit")
    for (dtype, head_dim), figures in found.items():
        largest, worst = (max(column) for column in zip(*figures, strict=True))
        print(f"{dtype:<5}  {head_dim:8}  {len(figures):5}  {largest:13.2e}  {worst:12.2f}")
    return faults


def check_writes(dtype: str, head_dim: int, device: str) -> list[str]:
    """Write rows around the end of rings; every bit of the ring must be as expected."""
    faults = []
    for rows, capacity in ((1, 16), (5, 16), (16, 16), (8, 2064)):
        made = torch.Generator(device).manual_seed(rows)
        shapes = [(3, 2, size, head_dim) for size in (capacity, rows)]
        ring, new = (torch.randn(shape, generator=made, device=device).to(DTYPES[dtype]) for shape in shapes)
        start = torch.tensor([0, capacity - 1, 2**33 + capacity - 3], device=device)
        expected = reference.ring_write(ring, new, start)
        operators.ring_write(ring, new, start)()
        if not torch.equal(ring, expected):
            faults.append(f"ring_write {dtype} D {head_dim}, {rows} rows of {capacity}: {int((ring != expected).sum())} values are wrong")
    return faults


def check_neighbours(dtype: str, device: str) -> list[str]:
    """What a request gives must not depend on its neighbours, bit for bit."""
    case = Case(dtype, 128, 32, 8, 2, 7, 2064, 2048, total=(700, 5000), first=(0,))
    results = []
    for neighbour in (5000, 3):
        tensors = case.tensors(device)
        tensors["total"][1] = neighbour
        operators.block_attention(tensors, 0.1, case.window)()
        results.append(tensors["attended"][0])
    return [] if torch.equal(*results) else [f"{case}: the result of a request depends on its neighbour"]


def run(_: Path) -> str:
    """Run all cases on the card."""
    torch.zeros(1, device="cuda")  # makes torch's context the current one
    driver.install()
    chosen = list(cases())
    faults = compare(chosen, "cuda")
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            faults += check_writes(dtype, head_dim, "cuda")
        faults += check_neighbours(dtype, "cuda")
    if faults:
        raise Failed("; ".join(faults))
    return f"{len(chosen)} attentions within 1 rounding + {SLACK}, {4 * len(DTYPES) * len(HEAD_DIMS)} ring writes bit for bit"
