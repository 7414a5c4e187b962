"""Section: the time of the kernels against the bytes that they must move and the copy bandwidth of this card.

Figures, without limits. Each launch of a graph uses tensors of its own, more in all than a second-level cache holds, so that bytes come
from memory; a CUDA graph leaves out what launching costs. Letters as in `device.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from device import driver, operators
from device.operators import DTYPES, Call

CAPACITY, WINDOW, HEADS, KV_HEADS, HEAD_DIM = 2064, 2048, 32, 8, 128
"""The drafter of Qwen3-8B with the default window."""

BEYOND_CACHE = 512 << 20
COPY_BYTES = 1 << 30
NEW_ROWS = 8


def attention_bytes(batch: int, block: int, element: int) -> int:
    """Return the bytes that an attention over full rings must read and write."""
    keys_and_values = 2 * batch * KV_HEADS * (WINDOW + block) * HEAD_DIM * element
    return keys_and_values + 2 * batch * HEADS * block * HEAD_DIM * element


def write_bytes(batch: int, element: int) -> int:
    """Return the bytes that a ring write must read and write."""
    return 2 * batch * KV_HEADS * NEW_ROWS * HEAD_DIM * element


def attention_tensors(dtype: str, batch: int, block: int) -> dict[str, torch.Tensor]:
    """Return inputs and output of one attention over full rings."""
    kind = DTYPES[dtype]

    def random(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(batch, heads, rows, HEAD_DIM, device="cuda", dtype=kind)

    rings = {name: random(KV_HEADS, CAPACITY) for name in ("ring_key", "ring_value")}
    blocks = {name: random(KV_HEADS, block) for name in ("block_key", "block_value")}
    total, first = torch.full((batch,), 10 * CAPACITY, device="cuda"), torch.zeros(batch, device="cuda", dtype=torch.int64)
    query = random(HEADS, block)
    return {"query": query, **rings, **blocks, "total": total, "first": first, "attended": torch.empty_like(query)}


def attentions(dtype: str, batch: int, block: int) -> list[Call]:
    """Return calls on tensors of their own, beyond the cache in all; the workspace is one, as that of an engine's layers is."""
    count = max(2, math.ceil(BEYOND_CACHE / attention_bytes(batch, block, DTYPES[dtype].itemsize)))
    calls: list[Call] = []
    for _ in range(count):
        shared = calls[0].workspace if calls else None
        calls.append(operators.block_attention(attention_tensors(dtype, batch, block), HEAD_DIM**-0.5, WINDOW, shared))
    return calls


def writes(dtype: str, batch: int) -> list[Call]:
    """Return calls that write the rows of a round, on rings of their own."""
    calls = []
    for i in range(16):
        rings, rows = (torch.zeros(batch, KV_HEADS, size, HEAD_DIM, device="cuda", dtype=DTYPES[dtype]) for size in (CAPACITY, NEW_ROWS))
        calls.append(operators.ring_write(rings, rows, torch.full((batch,), 100 * i, device="cuda")))
    return calls


def seconds_each(calls: Sequence[Callable[[], object]]) -> float:
    """Return the time of one of the calls, which are replayed in turn in a CUDA graph for a fifth of a second."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def replay(times: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times

    replay(3)
    return replay(max(3, min(1000, int(0.2 / replay(3))))) / len(calls)


def copy_bandwidth() -> float:
    """Return bytes a second, read and written, of a copy from device memory to device memory."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    copies = [torch.empty_like(source) for _ in range(2)]
    return 2 * COPY_BYTES / seconds_each([lambda copy=copy: copy.copy_(source) for copy in copies])


def line(what: Mapping[str, object], seconds: float, size: int, copying: float) -> str:
    """Return a line of the table."""
    cells = "  ".join(f"{value!s:>6}" for value in what.values())
    return f"{cells}  {seconds * 1e6:8.1f}  {size / 1e6:8.2f}  {size / seconds / 1e9:7.0f}  {size / seconds / copying:6.1%}"


def run(_: Path) -> str:
    """Measure on the card and print the table."""
    torch.zeros(1, device="cuda")
    driver.install()
    copying = copy_bandwidth()
    print(f"copy: {copying / 1e9:.0f} GB/s, read and written")
    print(f"R {CAPACITY}, W {WINDOW}, Hq {HEADS}, G {KV_HEADS}, D {HEAD_DIM}; a write stores {NEW_ROWS} rows")
    print("kernel   dtype   batch       T        us        MB     GB/s  of copy")
    summary = ""
    for dtype, kind in DTYPES.items():
        for batch in (1, 8, 32):
            for block in (7, 16):
                seconds, size = seconds_each(attentions(dtype, batch, block)), attention_bytes(batch, block, kind.itemsize)
                print(line({"kernel": "attend", "dtype": dtype, "batch": batch, "T": block}, seconds, size, copying), flush=True)
                if (dtype, block) == ("bf16", 7):
                    summary += f", batch {batch} {size / seconds / copying:.0%}"
            seconds, size = seconds_each(writes(dtype, batch)), write_bytes(batch, kind.itemsize)
            print(line({"kernel": "write", "dtype": dtype, "batch": batch, "T": "-"}, seconds, size, copying), flush=True)
    return f"copy {copying / 1e9:.0f} GB/s; attention of 7 bf16 rows, share of it:{summary.removeprefix(',')}"
