"""What quantisation changes: a quantised target against the float32 one of its checkpoint, over the tokens of prompts.

Both see the same tokens, so that logits compare position by position. Needs torch and the memory of the target in float32.
Knows logits. Does not know drafting: it changes no output. N new rows, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dspark.export.bundle import identity
from dspark.export.checkpoint import open_checkpoint
from dspark.export.pair import load_pair
from dspark.export.target import Target
from dspark.export.verify import load_weights
from dspark.runtime.bundle import Bundle
from dspark.runtime.engine import Array, Engine
from dspark.runtime.errors import CheckpointError
from dspark.runtime.state import Rows, Slots
from dspark.runtime.target import Qwen3Target


@dataclass(frozen=True)
class Difference:
    """Over `positions` next-token distributions: differences of logits, and what the tokens that did follow cost in each."""

    positions: int
    mean_logit: float
    """Mean magnitude of the difference of a logit; the largest logits of the float target are of magnitude `largest`."""
    max_logit: float
    largest: float
    same_tokens: float
    """Share of the positions at which both find the same token the most likely."""
    float_perplexity: float
    perplexity: float
    """Of the prompts' own tokens."""


def compare_with_float(bundle: Bundle, engine: Engine, target: Path, drafter: Path, prompts: Sequence[Sequence[int]]) -> Difference:
    """Compare the engine's target with that of the checkpoints that the bundle was exported from.

    Raises CheckpointError where the directories are not those, and EngineError.
    """
    manifest = bundle.manifest
    for model, directory in (("target", target), ("drafter", drafter)):
        if identity(open_checkpoint(directory)) != manifest.checkpoints[model]:
            raise CheckpointError(f"{directory} is not the {model} that {bundle.directory} was exported from: pass the one that it was")
    pair = load_pair(target, drafter, manifest.drafter.mask_token_id)
    reference = Target(manifest.target, manifest.drafter.target_layer_ids)
    load_weights("target", reference, pair.target_tensors, None)
    ours, theirs, follows = [], [], []
    for prompt in prompts:
        ours.append(_engine_logits(engine, prompt))
        theirs.append(_torch_logits(reference, prompt))
        follows += prompt[1:]
    quantised, exact = np.concatenate([rows[:-1] for rows in ours]), np.concatenate([rows[:-1] for rows in theirs])
    error = np.abs(quantised - exact)
    return Difference(
        positions=len(exact),
        mean_logit=float(error.mean()),
        max_logit=float(error.max()),
        largest=float(np.abs(exact).max()),
        same_tokens=float((quantised.argmax(-1) == exact.argmax(-1)).mean()),
        float_perplexity=_perplexity(exact, follows),
        perplexity=_perplexity(quantised, follows),
    )


def _engine_logits(engine: Engine, tokens: Sequence[int]) -> Array:
    """Return the logits `[N,V]` behind every token, in rounds as wide as the bundle verifies."""
    width, slots = engine.manifest.num_speculative_tokens + 1, Slots(1)
    target = Qwen3Target(engine, slots)
    slots.admit(0)
    view, rows = slots.view([0]), []
    for begin in range(0, len(tokens), width):
        part = np.asarray(tokens[begin : begin + width], np.int64)[None]
        fed = engine.allocate(part.shape, "int64")
        fed.write(part)
        rows.append(target.verify([0], Rows(view, fed), [part.shape[1] - 1]).logits.tensor.read()[0].copy())
        target.commit(0, part.shape[1])
    return np.concatenate(rows)


def _torch_logits(target: Target, tokens: Sequence[int]) -> Array:
    ids, rows = torch.tensor([list(tokens)]), torch.arange(len(tokens))[None]
    attention = [layer.self_attn for layer in target.layers]
    caches = [torch.zeros(1, a.k_proj.out_features // a.head_dim, len(tokens), a.head_dim) for a in attention for _ in ("key", "value")]
    with torch.no_grad():
        logits, _, _ = target(ids, torch.tensor([0]), rows, caches)
    return np.asarray(logits[0].numpy())


def _perplexity(logits: Array, follows: Sequence[int]) -> float:
    """Return the exponential of the mean negative log-likelihood of the tokens that follow."""
    wide = logits.astype(np.float64)
    largest = wide.max(-1, keepdims=True)
    normalizer = np.log(np.exp(wide - largest).sum(-1)) + largest[:, 0]
    return float(np.exp((normalizer - wide[np.arange(len(wide)), list(follows)]).mean()))
