"""Bytes and operations of the graphs of a round, from a pair's shape.

Every weight is read once a graph, the Markov output once a proposal, key and value projections of the drafter twice (for block rows and for
context rows), rings and caches once, of embedding tables the gathered rows; nothing stays in a processor's cache. In a quantised model the
projections of the layers and the LM heads are quantised, in groups that share a scale as wide as the float part; the Markov output keeps
8 bits at least; everything else, state included, stays float. Knows no machine and no times. K proposals.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from random_pair import Shape, drafter_tensors, target_tensors

GROUP = 32
"""Entries that share a scale: the exporter's default."""
FLOAT_BYTES = {"fp32": 4, "bf16": 2}
BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Storage:
    """Bytes of one entry: of the products' weights, of the Markov output, and of all else (state, logits, small weights)."""

    product: float
    markov: float
    other: int


def storage(dtype: str, other: int) -> Storage:
    """Return the storage of a dtype; `other` is that of the float part of a quantised model."""
    if dtype in FLOAT_BYTES:
        size = FLOAT_BYTES[dtype]
        return Storage(size, size, size)
    scale, bits = other / GROUP, BITS[dtype]
    return Storage(bits / 8 + scale, max(bits, 8) / 8 + scale, other)


@dataclass(frozen=True)
class Work:
    """Bytes moved, by what they are, and floating-point operations of a step."""

    weights: float
    state: float
    logits: float
    operations: float

    @property
    def bytes(self) -> float:
        """All bytes."""
        return self.weights + self.state + self.logits


def target_step(shape: Shape, kind: Storage, batch: int, rows: int, context: int) -> Work:
    """Return the work of a target step over `rows` new tokens of each request behind `context` cached ones, with logits of all rows."""
    tensors = target_tensors(shape)
    embedding = tensors.pop("model.embed_tokens.weight")
    tensors["lm_head.weight"] = embedding  # tied or not, one table of this size is multiplied with and one is gathered from
    tokens = batch * rows
    products = sum(prod(size) for size in tensors.values() if len(size) == 2)
    small = sum(prod(size) for size in tensors.values() if len(size) == 1) + tokens * shape.hidden
    state, attention = _attention(shape, shape.layers, batch, rows, context + rows)
    return Work(
        weights=products * kind.product + small * kind.other,
        state=(state + 2 * shape.layers * tokens * shape.kv_heads * shape.head_dim) * kind.other,
        logits=tokens * shape.vocabulary * 4,
        operations=2 * products * tokens + attention,
    )


def draft_step(shape: Shape, kind: Storage, batch: int, ring: int) -> Work:
    """Return the work of a draft step: K + 1 context rows, a block of K rows, the Markov walk; `ring` rows are visible."""
    tensors, rows, context = drafter_tensors(shape), batch * shape.block, batch * (shape.block + 1)
    layers = sum(prod(size) for name, size in tensors.items() if name.startswith("layers.") and len(size) == 2)
    twice = sum(prod(size) for name, size in tensors.items() if name.endswith(("k_proj.weight", "v_proj.weight")))
    head, markov, fc = (prod(tensors.get(name, (0,))) for name in ("lm_head.weight", "markov_head.markov_w2.weight", "fc.weight"))
    small = sum(prod(size) for name, size in tensors.items() if len(size) == 1 or name.startswith("confidence"))
    gathered = 2 * batch * shape.hidden + rows * shape.rank  # anchor and mask rows; a Markov row for each proposal
    state, attention = _attention(shape, shape.drafter_layers, batch, shape.block, ring + shape.block)
    return Work(
        weights=(layers + twice + head) * kind.product + shape.block * markov * kind.markov + (fc + small + gathered) * kind.other,
        state=(state + 2 * shape.drafter_layers * context * shape.kv_heads * shape.head_dim) * kind.other,
        logits=rows * shape.vocabulary * 4,
        operations=2 * ((layers + head + markov) * rows + (twice + fc) * context) + attention,
    )


def _attention(shape: Shape, layers: int, batch: int, rows: int, keys: int) -> tuple[float, float]:
    """Return the entries of keys and values that are read, and the operations of scores and sums."""
    entries = 2 * layers * batch * keys * shape.kv_heads * shape.head_dim
    return entries, 4 * layers * batch * rows * keys * shape.heads * shape.head_dim
