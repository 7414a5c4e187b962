"""Truncation of the target's distribution in torch: min_p, then top_k, then top_p of what is left, as one threshold.

An entry stays if its log-weight (logit minus the largest one, over the temperature) is not below the threshold; ties stay together. The
threshold is found by bisection, since TensorRT's TopK ends at 3840 entries and it has no sort. In stages, so that one step is traced.
B batch rows, M logit rows, V vocabulary rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dspark.export.choice import scaled

STEPS = 31
"""Halvings of the bracket: 104 / 2**31 is below the spacing of float32 logits."""
LOWEST = -104.0
"""Weights below exp(-104) are zero in float32."""


class Truncate(nn.Module):
    """Finds the threshold; `begin`, then STEPS times `narrow_count`, `needed_mass`, and STEPS times `narrow_mass`."""

    def forward(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """Return the threshold `[B,M]` on the log-weights of `logits [B,M,V]`; the exporter joins the same steps."""
        z, weights, low, zero = self.begin(logits, temperature, min_p)
        high = zero
        for _ in range(STEPS):
            low, high = self.narrow_count(z, top_k, low, high)
        needed, high = self.needed_mass(z, weights, top_p, low), zero
        for _ in range(STEPS):
            low, high = self.narrow_mass(z, weights, needed, low, high)
        return low

    def begin(self, logits: Tensor, temperature: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log-weights and weights `[B,M,V]`, and the bracket `[B,M]`: at the low end min_p holds, at the high end all are below."""
        z = scaled(logits, temperature)
        high = torch.zeros_like(z[..., 0])
        return z, torch.exp(z), high + torch.log(min_p).clamp(min=LOWEST)[:, None], high

    def narrow_count(self, z: Tensor, top_k: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Halve the bracket of the largest threshold that keeps `top_k [B]` entries."""
        middle = (low + high) / 2
        return _halve((z >= middle[..., None]).to(torch.float32).sum(-1) >= top_k[:, None], low, middle, high)

    def needed_mass(self, z: Tensor, weights: Tensor, top_p: Tensor, low: Tensor) -> Tensor:
        """Return the mass `[B,M]` that top_p must keep; out of reach where `top_p [B]` is 1, which cuts nothing."""
        needed = _mass(z, weights, low) * top_p[:, None]
        return torch.where((top_p >= 1)[:, None], math.inf, needed)

    def narrow_mass(self, z: Tensor, weights: Tensor, needed: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Halve the bracket of the largest threshold that keeps the mass `needed [B,M]`."""
        middle = (low + high) / 2
        return _halve(_mass(z, weights, middle) >= needed, low, middle, high)


def _halve(holds: Tensor, low: Tensor, middle: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(holds, middle, low), torch.where(holds, high, middle)


def _mass(z: Tensor, weights: Tensor, threshold: Tensor) -> Tensor:
    # A product, not Where: 0.7 against 7 ms for 8 x 151936 entries on ONNX Runtime's CPU provider.
    return (weights * (z >= threshold[..., None]).to(torch.float32)).sum(-1)
