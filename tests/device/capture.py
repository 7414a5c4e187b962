"""Section: a drafter layer's launches captured in a CUDA graph and replayed on changed inputs give what launching them gives.

Both ring writes, then the attention over the rings, a replay a round: positions advance, rings wrap, and results and rings must be equal
bit for bit to those of the same launches without a graph. Letters as in `device.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from device import driver, operators
from device.operators import DTYPES
from device.sections import Failed

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work and returns what replays it."""

ROUNDS, ROWS, BLOCK = 12, 8, 7


class Layer:
    """State and inputs of one layer: R `capacity`, W `window`, D 64."""

    def __init__(self, dtype: str, device: str, capacity: int, window: int) -> None:
        def zeros(heads: int, rows: int) -> torch.Tensor:
            return torch.zeros(2, heads, rows, 64, dtype=DTYPES[dtype], device=device)

        self.total = torch.zeros(2, dtype=torch.int64, device=device)
        self._start, first = torch.zeros_like(self.total), torch.zeros_like(self.total)
        self.key_ring, self.value_ring = zeros(2, capacity), zeros(2, capacity)
        self._fed = [zeros(2, ROWS), zeros(2, ROWS), zeros(4, BLOCK), zeros(2, BLOCK), zeros(2, BLOCK)]
        new_key, new_value, query, block_key, block_value = self._fed
        self.attended = torch.zeros_like(query)
        rings = {"ring_key": self.key_ring, "ring_value": self.value_ring}
        tensors = {"query": query, **rings, "block_key": block_key, "block_value": block_value, "total": self.total, "first": first}
        self._calls = [
            operators.ring_write(self.key_ring, new_key, self._start),
            operators.ring_write(self.value_ring, new_value, self._start),
            operators.block_attention(tensors | {"attended": self.attended}, 0.125, window),
        ]

    def launch(self) -> None:
        """Launch everything on the current stream."""
        for call in self._calls:
            call()

    def feed(self, number: int) -> None:
        """Set the inputs of a round: values from its number, request 1 commits three rows and request 0 all of them."""
        made = torch.Generator(self.total.device).manual_seed(number)
        for tensor in self._fed:
            tensor.copy_(torch.randn(tensor.shape, generator=made, device=tensor.device))
        self._start.copy_(self.total)
        self.total.add_(torch.tensor([ROWS, 3], device=self.total.device))


def compare(dtype: str, device: str, record: Record, capacity: int = 48, window: int = 40) -> list[str]:
    """Run a replayed and a launched layer side by side; return the rounds and tensors that differ."""
    launched, replayed = (Layer(dtype, device, capacity, window) for _ in range(2))
    replay = record(replayed.launch)
    faults = []
    for number in range(ROUNDS):
        for layer, act in ((launched, launched.launch), (replayed, replay)):
            layer.feed(number)
            act()
        for name in ("attended", "key_ring", "value_ring"):
            if not torch.equal(getattr(launched, name), getattr(replayed, name)):
                faults.append(f"{dtype}, ring of {capacity}: {name} differs in round {number}")
    if not replayed.attended.abs().sum() > 0:
        faults.append(f"{dtype}: nothing was computed")
    return faults


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    """Capture work in a CUDA graph; it runs once before, since TensorRT prepares at the first call after shapes were set."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def run(_: Path) -> str:
    """Compare on the card: rings that wrap, and one long enough to be split into pieces."""
    torch.zeros(1, device="cuda")
    driver.install()
    faults = [fault for dtype in DTYPES for sizes in ((48, 40), (2064, 2048)) for fault in compare(dtype, "cuda", recorded, *sizes)]
    if faults:
        raise Failed("; ".join(faults))
    return f"{ROUNDS} replays with changed inputs equal to launches, {', '.join(DTYPES)}, in one piece and in several"
