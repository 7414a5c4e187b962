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
from dspark.export.verify import load_weights, zeros
from dspark.runtime.bundle import Bundle
from dspark.runtime.engine import Array, Engine
from dspark.runtime.errors import CheckpointError, RequestError
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

    Raises CheckpointError where the directories are not those, RequestError without tokens that follow others, and EngineError.
    """
    manifest = bundle.manifest
    check_origin(bundle, target, drafter)
    judged = [prompt for prompt in prompts if len(prompt) > 1]
    if not judged:
        raise RequestError("the float target is compared on tokens that follow others: give a prompt of at least two tokens")
    pair = load_pair(target, drafter, manifest.drafter.mask_token_id)
    reference = Target(manifest.target, manifest.drafter.target_layer_ids)
    load_weights("target", reference, pair.target_tensors, None)
    positions = sum(len(prompt) - 1 for prompt in judged)
    summed, same, surprise, largest, most = 0.0, 0, np.zeros(2), 0.0, 0.0
    for prompt in judged:
        quantised, exact = _engine_logits(engine, prompt)[:-1], _torch_logits(reference, prompt)[:-1]
        error = np.abs(quantised - exact)
        summed += float(error.mean(-1).sum())
        most, largest = max(most, float(error.max())), max(largest, float(np.abs(exact).max()))
        same += int((quantised.argmax(-1) == exact.argmax(-1)).sum())
        surprise += [_surprise(exact, prompt[1:]), _surprise(quantised, prompt[1:])]
    float_perplexity, perplexity = np.exp(surprise / positions)
    return Difference(positions, summed / positions, most, largest, same / positions, float(float_perplexity), float(perplexity))


def check_origin(bundle: Bundle, target: Path, drafter: Path) -> None:
    """Raise CheckpointError unless the bundle was exported from these two directories."""
    for model, directory in (("target", target), ("drafter", drafter)):
        if identity(open_checkpoint(directory)) != bundle.manifest.checkpoints[model]:
            raise CheckpointError(f"{directory} is not the {model} that {bundle.directory} was exported from: pass the one that it was")


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
    with torch.no_grad():
        logits, _, _ = target(ids, torch.tensor([0]), rows, zeros(target, len(tokens)))
    return np.asarray(logits[0].numpy())


def _surprise(logits: Array, follows: Sequence[int]) -> float:
    """Return the negative log-likelihood of the tokens that follow."""
    wide = logits.astype(np.float64)
    largest = wide.max(-1, keepdims=True)
    normalizer = np.log(np.exp(wide - largest).sum(-1)) + largest[:, 0]
    return float((normalizer - wide[np.arange(len(wide)), list(follows)]).sum())
