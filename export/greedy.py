"""Compare engines with a reference, token by token: a greedy speculative run of each against plain decoding on the reference.

Where an output leaves the reference's, the reference is asked what its logits were there. If the two tokens were a near tie, rounding chose
between them, and the run goes on behind the reference's token; otherwise the engine is wrong. Knows token ids; not tensors of state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark.export.tolerance import spacing, tie_limit
from dspark.runtime.bundle import Manifest
from dspark.runtime.decode import Decoder
from dspark.runtime.drafter import Drafter
from dspark.runtime.engine import Array, Engine
from dspark.runtime.graphs import TARGET
from dspark.runtime.request import Request
from dspark.runtime.state import Slots
from dspark.runtime.stop import StopRule
from dspark.runtime.target import Qwen3Target

Prompt = list[int]


@dataclass(frozen=True)
class Divergence:
    """Where an engine's output first leaves the reference's, or does so again behind a near tie."""

    prompt: int
    position: int
    """Number of output tokens before it."""
    expected: int
    got: int
    gap: float
    """The reference's largest logit minus its second largest."""
    lead: float
    """The reference's logit of the expected token minus that of the engine's."""
    limit: float
    """The lead up to which it is a near tie."""
    gap_in_ulps: float
    """The gap in units in the last place of the bundle's dtype at the largest logit."""

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may have chosen."""
        return self.lead <= self.limit


@dataclass
class Tokens:
    """What the token by token comparison of an engine gave."""

    compared: int
    """Output tokens of all prompts."""
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every divergence is a near tie."""
        return all(divergence.is_near_tie for divergence in self.divergences)


def seeded_prompts(manifest: Manifest, seed: int = 0) -> list[Prompt]:
    """Return two prompts of different length."""
    rng, longest = np.random.default_rng(seed), max(1, manifest.limits.max_seq_len // 2)
    return [rng.integers(0, manifest.target.vocab_size, min(length, longest)).tolist() for length in (7, 23)]


def plain_tokens(reference: Engine, prompts: Sequence[Prompt], tokens: int) -> list[Prompt]:
    """Return the greedy output of each prompt by plain decoding. Raises EngineError or RequestError."""
    return _decode(reference, prompts, [tokens] * len(prompts), speculative=False)


def compare_tokens(manifest: Manifest, reference: Engine, engine: Engine, prompts: Sequence[Prompt], expected: Sequence[Prompt]) -> Tokens:
    """Decode the prompts together and speculatively and compare with `expected`, the plain output. Raises EngineError or RequestError."""
    report, done = Tokens(sum(map(len, expected))), [0] * len(prompts)
    while left := [i for i in range(len(prompts)) if done[i] < len(expected[i])]:
        begun = [prompts[i] + expected[i][: done[i]] for i in left]
        outputs = _decode(engine, begun, [len(expected[i]) - done[i] for i in left], speculative=True)
        for i, output in zip(left, outputs, strict=True):
            wanted = expected[i][done[i] :]
            same = next((n for n, pair in enumerate(zip(wanted, output, strict=True)) if pair[0] != pair[1]), len(wanted))
            done[i] += same + 1
            if same < len(wanted):
                position = done[i] - 1
                logits = _logits(reference, prompts[i] + expected[i][:position])
                divergence = _divergence(manifest, logits, i, position, wanted[same], output[same])
                report.divergences.append(divergence)
                if not divergence.is_near_tie:
                    done[i] = len(expected[i])
    return report


def _decode(engine: Engine, prompts: Sequence[Prompt], tokens: Sequence[int], *, speculative: bool) -> list[Prompt]:
    """Return the greedy output of each prompt, whatever end tokens it holds; they are decoded together as far as the limits allow."""
    manifest = engine.manifest
    slots = Slots(min(len(prompts), manifest.limits.max_batch_size))
    decoder = Decoder(
        engine,
        slots,
        Qwen3Target(engine, slots),
        Drafter(engine, slots),
        num_speculative_tokens=manifest.num_speculative_tokens,
        max_seq_len=manifest.limits.max_seq_len,
    )
    rules = [StopRule(frozenset(), most) for most in tokens]
    requests = [Request(i, prompt, rule, speculative=speculative) for i, (prompt, rule) in enumerate(zip(prompts, rules, strict=True))]
    for request in requests:
        decoder.add(request)
    while any(request.finish_reason is None for request in requests):
        decoder.step()
    for request in requests:
        if request.error is not None:
            raise request.error
    return [list(request.output) for request in requests]


def _logits(reference: Engine, tokens: Prompt) -> Array:
    """Return the reference's logits `[V]` behind `tokens`."""
    slots, chunk = Slots(1), reference.manifest.limits.max_chunk
    target = Qwen3Target(reference, slots)
    slots.admit(0)
    for begin in range(0, len(tokens), chunk):
        verified = target.prefill(0, tokens[begin : begin + chunk])
    return np.array(verified.logits.tensor.read()[0, 0])


def _divergence(manifest: Manifest, logits: Array, prompt: int, position: int, expected: int, got: int) -> Divergence:
    second, largest = np.sort(logits.astype(np.float64))[-2:]
    return Divergence(
        prompt,
        position,
        expected,
        got,
        gap=float(largest - second),
        lead=float(logits[expected]) - float(logits[got]),
        limit=tie_limit(manifest, TARGET, "logits", logits),
        gap_in_ulps=float((largest - second) / spacing(manifest, float(largest))),
    )
