"""How a token is chosen from logits, in torch: the greedy choice, the distribution at a temperature, a draw from it.

All in float32. Random numbers are inputs, so that graphs stay pure. Knows single distributions; acceptance is export.accept.
B batch rows, V vocabulary rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.runtime.sampling import COLD

_BLOCK = 128
_LARGEST_BELOW_1 = 1 - 2**-24


def greedy_choice(logits: Tensor) -> Tensor:
    """Return the lowest index of the largest entry of `logits [..., V]`; the last index for a row with NaN, which harms no other row.

    Written with max, equality and min, since engines differ in which of equal entries their arg max returns.
    """
    indices = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    is_largest = logits == logits.amax(-1, keepdim=True)
    return torch.where(is_largest, indices, logits.shape[-1] - 1).amin(-1).to(torch.int64)


def one_hot(choice: Tensor, vocabulary: int) -> Tensor:
    """Return `[B,V]` with a one at `choice [B]`."""
    return (torch.arange(vocabulary, device=choice.device) == choice[:, None]).to(torch.float32)


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return `logits [B,M,V]` minus their largest entry, divided by `temperature [B]`: the log of weights whose largest is 1."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=COLD)[:, None, None]


def distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the probabilities of `logits [B,V]` at `temperature [B]`; one-hot at the greedy choice where that is cold."""
    warm = torch.softmax(logits / temperature.clamp(min=COLD)[:, None], -1)
    return torch.where((temperature < COLD)[:, None], one_hot(greedy_choice(logits), logits.shape[-1]), warm)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw from `weights [B,V]` by inverse CDF: the first index whose cumulative sum exceeds `uniform [B]` in [0,1) of the total.

    Never an index of weight zero. Summed in two levels, blocks and then inside one: in a single float32 sum over 151936 entries those
    of less than 6e-8 vanish behind the first half of the mass.
    """
    blocks = F.pad(weights, (0, -weights.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    block, inside = _first_above(blocks.sum(-1), uniform)
    index, _ = _first_above(take_row(blocks, block), inside)
    return block * _BLOCK + index


def _first_above(weights: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index `[B]` of `weights [B,n]` whose cumulative sum exceeds `fraction [B]` of the total, and the fraction in it."""
    # The largest sum is the total: a parallel scan need not be monotonous, and some index must exceed the target.
    sums = torch.where(weights > 0, weights.cumsum(-1), 0.0)
    target = fraction[:, None] * sums.amax(-1, keepdim=True)
    indices = torch.arange(weights.shape[-1], dtype=torch.int32, device=weights.device)
    first = torch.where(sums > target, indices, weights.shape[-1] - 1).amin(-1, keepdim=True).to(torch.int64)
    own = weights.gather(-1, first)
    inside = (target - (sums.gather(-1, first) - own)) / own
    return first[:, 0], inside[:, 0].clamp(0.0, _LARGEST_BELOW_1)


def take_row(x: Tensor, row: Tensor) -> Tensor:
    """Return row `row[b]` of each `x[b]`: `[B,n,V]` and `[B]` give `[B,V]`."""
    if torch.onnx.is_in_onnx_export():
        shape = (x.shape[0], x.shape[2])
        return torch.onnx.ops.symbolic("::GatherND", (x, row[:, None]), {"batch_dims": 1}, dtype=x.dtype, shape=shape)
    return x[torch.arange(x.shape[0], device=x.device), row]
