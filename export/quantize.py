"""Weight-only quantisation in numbers: groups of one row of a weight share a float32 scale.

The layout is that of ONNX Runtime's MatMulNBits: unsigned integers whose zero is half of their range, two of 4 bits in a byte, the
first one low. Knows arrays and which parameters are quantised. Does not know files (export.weights) or graphs (export.lower_weights).
N output rows, I input columns, g group size, j groups of a row: I / g rounded up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.bundle import Quantization
from dspark.runtime.errors import CheckpointError

DEFAULT_GROUP_SIZE = 32
MARKOV_OUTPUT = "markov_head.markov_w2.weight"
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


def quantized_bits(model: str, parameter: str, quantization: Quantization) -> int | None:
    """Return the bits of a parameter of the `target` or the `drafter`, None where it stays float.

    Quantised are the projections of the layers, the LM heads and the Markov head's output. `fc` is not (its inputs are raw residuals
    with entries above 2e4, of which 8 bits of a group's largest would leave little), nor what is small: norms, biases, the
    confidence head, the Markov head's gates.
    """
    if parameter == MARKOV_OUTPUT:
        return quantization.markov_bits
    if parameter == "lm_head.weight" or (parameter.startswith("layers.") and parameter.endswith("_proj.weight")):
        return quantization.target_bits if model == "target" else quantization.drafter_bits
    return None


def packed_shape(shape: tuple[int, ...], bits: int, group: int) -> tuple[int, int, int]:
    """Return the shape `[N, j, bytes of a group]` of a quantised weight `[N, I]`."""
    rows, columns = shape
    return rows, -(-columns // group), group * bits // 8


def quantize_rows(rows: NDArray[np.float32], bits: int, group: int, name: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return packed integers and scales `[N, j]` of `rows [N, I]`; columns that fill the last group stand for zero.

    The entry of largest magnitude in a group becomes the integer 0, exactly; one of equal magnitude and the other sign is one step
    off, all others at most half a step. Raises CheckpointError naming the weight where an entry is infinite or not a number.
    """
    half = 1 << (bits - 1)
    spare = -rows.shape[1] % group
    padded = np.pad(rows, ((0, 0), (0, spare))) if spare else rows
    values = padded.reshape(len(rows), -1, group)
    high, low = values.max(-1), values.min(-1)
    scales = np.where(high >= -low, high, low) / np.float32(-half)
    if not np.isfinite(scales).all():
        raise CheckpointError(f"{name} has infinite or not-a-number entries, which cannot be quantised")
    scales[np.abs(scales) < _SMALLEST_SCALE] = 0.0
    steps = values * np.divide(1.0, scales, out=np.zeros_like(scales), where=scales != 0)[..., None]
    np.rint(steps, out=steps)
    np.clip(steps, -half, half - 1, out=steps)
    steps += half
    integers = steps.astype(np.uint8)
    return (integers[..., 0::2] | (integers[..., 1::2] << 4) if bits == 4 else integers), scales


def dequantize(packed: NDArray[np.uint8], scales: NDArray[np.float32], bits: int, columns: int) -> NDArray[np.float32]:
    """Return the weight `[N, I]` of `columns` columns that the packed integers and scales stand for."""
    integers = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1) if bits == 4 else packed
    values = (integers.astype(np.float32) - np.float32(1 << (bits - 1))) * scales[..., None]
    return np.ascontiguousarray(values.reshape(len(values), -1)[:, :columns])
