"""How far an engine may be from the float32 reference, from its dtype and the depth of what is compared: the one place for such numbers.

A tensor's difference is divided by the largest magnitude of the reference tensor, and allowed up to FACTOR x u x sqrt(1 + depth): u is the
unit roundoff of the dtype, depth the number of layers that the values went through, and roundings of layers add up as a random walk does.
In float32 also the order of long sums counts, which the other dtypes accumulate in float32. Measured against torch, ONNX Runtime on the CPU
needs a factor of at most 14 in float32 and 2.8 in fp16 (golden checkpoints and example pair). Integers are exact but where the choice is
a near tie. The graphs without weights compute in float32 in every bundle.
"""

from __future__ import annotations

import math

import numpy as np

from dspark.runtime.bundle import Manifest
from dspark.runtime.engine import Array
from dspark.runtime.graphs import CONTEXT, DRAFT, DRAFT_SAMPLED, MODEL_DTYPE, TARGET, TensorSpec

SIGNIFICAND = {"fp32": 24, "fp16": 11, "bf16": 8}
"""Bits of a number, the leading one included."""
FACTOR = {"fp32": 64, "fp16": 6, "bf16": 6}
ROUNDED = 0.1
"""The same for quantised bundles, whose products round their inputs to 8 bits, as torch does not."""
_TIE = 1 / 3
"""A near tie is a matter of two entries, the tolerance one of the largest error among all of a vocabulary."""
_PROBABILITY = 8
"""An error of a logit of 8 counts eight times in the probability, as that depends on differences, not on ratios."""


def tolerance(manifest: Manifest, graph: str, name: str) -> float:
    """Return the largest difference of an output, relative to the largest magnitude of the reference (see `scale`)."""
    target, drafter = manifest.target.num_hidden_layers, manifest.drafter.num_hidden_layers
    if "_ring." in name:
        depth = 1  # the context rows go through one projection, whatever the layer
    elif "_cache." in name:
        depth = int(name.split(".")[1]) + 1
    elif graph == TARGET:
        depth = target + 1
    else:
        depth = drafter + 2 if graph in (DRAFT, DRAFT_SAMPLED) else 1
    if manifest.quantization is not None and graph in (CONTEXT, DRAFT, DRAFT_SAMPLED, TARGET):
        return ROUNDED
    dtype = manifest.dtype if graph in (CONTEXT, DRAFT, DRAFT_SAMPLED, TARGET) else "fp32"
    one = FACTOR[dtype] * 2.0 ** -SIGNIFICAND[dtype] * math.sqrt(1 + depth)
    return one * _PROBABILITY if name == "draft_probs" else one


def scale(spec: TensorSpec, reference: Array) -> float:
    """Return what differences of an output are divided by; logits below 1 and probabilities matter by their absolute size."""
    largest = float(np.abs(reference).max(initial=0))
    return largest if spec.dtype == MODEL_DTYPE else max(1.0, largest)


def tie_limit(manifest: Manifest, graph: str, name: str, logits: Array) -> float:
    """Return the lead of one of the `logits` over another that rounding may turn."""
    return _TIE * tolerance(manifest, graph, name) * max(1.0, float(np.abs(logits).max()))


def spacing(manifest: Manifest, value: float) -> float:
    """Return the distance of neighbouring numbers of the bundle's dtype around `value`: one unit in the last place."""
    _, exponent = math.frexp(value)
    return 2.0 ** (exponent - SIGNIFICAND[manifest.dtype])
