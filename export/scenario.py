"""The calls of an accuracy comparison: two requests of different length are prefilled, then drafted, verified and judged for four rounds.

The rows that each request commits are set, so that every engine is asked the same. What one graph gives another, and what the next round
is made of, is the reference's; only rings and caches are each engine's own. Knows positions and token ids; not engines.
B batch rows, N new rows, K proposals, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass

import numpy as np

from dspark.runtime.bundle import Manifest
from dspark.runtime.engine import Array
from dspark.runtime.graphs import ACCEPT, ACCEPT_SAMPLED, CONTEXT, DRAFT, DRAFT_SAMPLED, LOGPROBS, TARGET, TRUNCATE

COMMITS = ((1, 3), (2, 1), (4, 2), (1, 4))
"""Rows that each request commits in each round, as far as a round has so many."""
SAMPLED_ROUNDS = (2,)
_HOLE = 3
"""First position that the second request's drafter has seen, where its ring cannot wrap."""


@dataclass(frozen=True)
class Call:
    """A graph's turn: which step of the scenario it belongs to, and its inputs other than the state."""

    step: str
    graph: str
    feed: dict[str, Array]


Outputs = Mapping[str, Array]
Calls = Generator[Call, Outputs, None]


def batch_size(manifest: Manifest) -> int:
    """Return the number of requests: two, or one where the bundle serves no more."""
    return min(2, manifest.limits.max_batch_size)


def scenario(manifest: Manifest, seed: int = 0) -> Calls:
    """Yield calls; each wants the reference's outputs sent back."""
    k, limits, batch = manifest.num_speculative_tokens, manifest.limits, batch_size(manifest)
    rng = np.random.default_rng(seed)
    lengths, first = np.zeros(batch, np.int64), _first_positions(manifest, batch)
    anchors = np.zeros(batch, np.int64)
    chunk = max(1, min(k + 1, limits.max_chunk, limits.max_seq_len // 4))
    for part, fed in enumerate(((chunk, chunk), (0, max(1, chunk // 2)))):
        tokens = rng.integers(0, manifest.target.vocab_size, (batch, max(fed)))
        # Rows of a request that is fed less are junk behind its end, as in a batch of unequal requests.
        last = np.full((batch, 1), max(fed) - 1)
        outputs = yield Call(f"prefill {part}", TARGET, {"tokens": tokens, "start": lengths.copy(), "logit_rows": last})
        taps, choice = outputs["taps"], outputs["logits"][:, 0].argmax(-1)
        yield Call(f"prefill {part}", CONTEXT, {"taps": taps, "start": first + lengths})
        lengths += fed[-batch:]
        anchors = np.where(np.array(fed[-batch:]) > 0, choice, anchors)
    taps, counts, written = np.zeros_like(taps[:, :1]), np.zeros(batch, np.int64), first + lengths
    for number, commits in enumerate(COMMITS):
        if lengths.max() + k + 1 > limits.max_seq_len:
            return
        step, sampled = f"round {number}", number in SAMPLED_ROUNDS
        total = written + counts
        feed = {"taps": taps, "start": written, "total": total, "first": first, "anchor": anchors}
        temperature = np.linspace(0.7, 1.0, batch).astype(np.float32)
        if sampled:
            feed |= {"temperature": temperature, "draft_uniform": rng.random((batch, k), np.float32)}
        drafted = yield Call(step, DRAFT_SAMPLED if sampled else DRAFT, feed)
        written, tokens = total, drafted["verify_tokens"]
        every_row = np.tile(np.arange(k + 1), (batch, 1))
        verified = yield Call(step, TARGET, {"tokens": tokens, "start": lengths.copy(), "logit_rows": every_row})
        logits, judged = verified["logits"], np.arange(k, k - batch, -1).clip(min=0)
        feed = {"logits": logits, "verify_tokens": tokens, "count": judged}
        if sampled:
            cut = {"top_k": np.full(batch, max(1, logits.shape[-1] // 2)), "top_p": np.full(batch, 0.9, np.float32)}
            cut |= {"temperature": temperature, "min_p": np.full(batch, 0.01, np.float32)}
            truncated = yield Call(step, TRUNCATE, {"logits": logits, **cut})
            feed |= {"draft_probs": drafted["draft_probs"], "temperature": temperature, "threshold": truncated["threshold"]}
            feed |= {"accept_uniform": rng.random((batch, k), np.float32), "next_uniform": rng.random(batch, np.float32)}
        chosen = yield Call(step, ACCEPT_SAMPLED if sampled else ACCEPT, feed)
        yield Call(step, LOGPROBS, {"logits": logits, "verify_tokens": tokens} | {n: chosen[n] for n in ("accepted", "next_token")})
        counts = np.minimum(commits[-batch:], k + 1)
        anchors = logits[np.arange(batch), counts - 1].argmax(-1)
        taps, lengths = verified["taps"], lengths + counts


def _first_positions(manifest: Manifest, batch: int) -> Array:
    """Return the first seen position of each request: the last request's rows wrap around the ring where a sequence may be so long."""
    k, longest = manifest.num_speculative_tokens, manifest.limits.max_seq_len
    needed = 2 * (k + 1) + sum(map(max, COMMITS))
    near_the_end = manifest.ring_capacity - (k + 1) - 2
    first = np.zeros(batch, np.int64)
    if near_the_end + needed + k + 1 <= longest:
        first[-1] = near_the_end
    elif _HOLE + needed + k + 1 <= longest:
        first[-1] = _HOLE
    return first
