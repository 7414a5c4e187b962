"""Operators on torch tensors, launched as the TensorRT plugins launch them: `dspark.plugins.launch` prepares and launches.

Knows tensors and addresses; not what is computed. Letters as in `dspark.plugins.contract`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dspark.plugins import launch
from dspark.plugins.contract import BLOCK_ATTENTION, RING_WRITE, Operator
from dspark.plugins.rules import exact_sizes

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Call:
    """One operator bound to its tensors; calling it launches on torch's current stream."""

    def __init__(
        self, operator: Operator, tensors: Mapping[str, torch.Tensor], attributes: Mapping[str, Any], shared: torch.Tensor | None = None
    ) -> None:
        first = next(iter(tensors.values()))
        dtype = next(name for name, kind in DTYPES.items() if kind == first.dtype)
        sizes = exact_sizes(operator, [tuple(tensors[name].shape) for name in operator.inputs])
        scratch = launch.workspace(operator, dtype, sizes, attributes)
        # Not a number: what a kernel reads without having written it shows.
        self.workspace = torch.full((max(scratch // 4, 1),), torch.nan, device=first.device) if shared is None else shared
        self._kept = {**tensors, launch.WORKSPACE: self.workspace}
        self._addresses = {name: tensor.data_ptr() for name, tensor in self._kept.items()}
        self._prepared = launch.prepare(operator, dtype, sizes, attributes)
        self.launches = tuple(one.launch for one in self._prepared)

    def __call__(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self.workspace.is_cuda else 0
        launch.launch(self._prepared, self._addresses, stream)


def ring_write(ring: torch.Tensor, rows: torch.Tensor, start: torch.Tensor) -> Call:
    """Write `rows [B,G,N,D]` into `ring [B,G,R,D]`, in place."""
    return Call(RING_WRITE, {"ring": ring, "rows": rows, "start": start, "updated": ring}, {})


def block_attention(tensors: Mapping[str, torch.Tensor], scale: float, window: int, shared: torch.Tensor | None = None) -> Call:
    """Attend a block; `tensors` holds the operator's inputs and `attended`, `shared` the workspace of a call of the same sizes."""
    (_, heads, _, head_dim), kv_heads = tensors["query"].shape, tensors["ring_key"].shape[1]
    attributes = {"scale": scale, "window": window, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return Call(BLOCK_ATTENTION, tensors, attributes, shared)
