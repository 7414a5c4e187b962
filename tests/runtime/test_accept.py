"""The acceptance graphs against plain Python and float64 numpy: greedy, sampled, truncation, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from engines import Parts, open_parts

from dspark.export import choice, truncate
from dspark.export.accept import Accept, AcceptSampled
from dspark.runtime.accept import Acceptance
from dspark.runtime.sampling import Draws, Sampled, SamplingParams
from dspark.runtime.state import Rows, View

V, K, B = 320, 7, 4
VIEW = View(0, B, tuple(range(B)))
Array = np.ndarray


def tensors(parts: Parts, **values: Array) -> dict[str, Any]:
    """Return engine tensors that hold the values."""
    made = {}
    for name, array in values.items():
        made[name] = parts.engine.allocate(array.shape, str(array.dtype))
        made[name].write(array)
    return made


def expected(logits: Array, tokens: Array, count: int) -> tuple[int, int]:
    """Return accepted count and next token of one greedy request."""
    choices = [int(np.flatnonzero(row == row.max())[0]) for row in logits]
    accepted = 0
    while accepted < count and tokens[accepted + 1] == choices[accepted]:
        accepted += 1
    return accepted, choices[accepted]


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_every_count(small_bundle: Path, rows: int) -> None:
    """Proposals agree on a prefix of every length, also behind the count that is judged; equal logits choose the lowest index."""
    parts, rng = open_parts(small_bundle), np.random.default_rng(rows)
    accept = Acceptance(parts.engine)
    for agree in range(8):
        for _ in range(4):
            values = rng.integers(0, 4, (B, rows, V)).astype(np.float32)
            drafted = rng.integers(0, V, (B, K + 1))
            drafted[:, 1 : 1 + min(agree, rows)] = values.argmax(-1)[:, : min(agree, 7)]
            counts = rng.integers(0, rows, B)
            own = tensors(parts, logits=values, tokens=drafted)
            chosen = accept.greedy(Rows(VIEW, own["logits"]), counts, own["tokens"])
            in_torch = Accept()(*(torch.from_numpy(v) for v in (values, drafted, counts)))
            reference = np.array([expected(*row) for row in zip(values, drafted, counts, strict=True)])
            np.testing.assert_array_equal(np.stack([chosen.accepted, chosen.next_token], -1), reference)
            np.testing.assert_array_equal(torch.stack(in_torch, -1).numpy(), reference)


def invert(weights: Array, uniform: float) -> tuple[set[int], int]:
    """Return the indices that inverse CDF may choose if the sums are a little off, and the exact one."""
    sums = np.cumsum(weights) / weights.sum()
    found = [int(np.searchsorted(sums, np.clip(uniform + d, 0, sums[-1] * (1 - 1e-12)), side="right")) for d in (-2e-6, 0.0, 2e-6)]
    return set(range(found[0], found[2] + 1)), found[1]


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.5, top_p=0.9),
    SamplingParams(temperature=0.9, min_p=0.1),
    SamplingParams(temperature=1.2, top_k=40, top_p=0.8, min_p=0.001),
    SamplingParams(temperature=5e-6, top_k=3),
    SamplingParams(temperature=1e-3, top_p=0.5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=3.0, top_p=1e-6),
    SamplingParams(temperature=1.0, top_k=V + 5, top_p=0.999999),
]


def random_logits(rng: np.random.Generator, rows: int) -> Array:
    logits = rng.standard_normal((B, rows, V)) * rng.choice([1.0, 4.0, 12.0], (B, 1, 1))
    logits[:3] = logits[:3].round(1)  # many ties
    logits[1, :, rng.integers(0, V, 50)] = -np.inf
    return logits.astype(np.float32)


@pytest.mark.parametrize("first", range(0, len(PARAMS), B))
def test_truncation_keeps_what_sorting_keeps(small_bundle: Path, first: int) -> None:
    parts, rng = open_parts(small_bundle), np.random.default_rng(first)
    accept, params = Acceptance(parts.engine), (PARAMS * 2)[first : first + B]
    rows = {i: Sampled(p, 0, 9) for i, p in enumerate(params)}
    for _ in range(10):
        logits = random_logits(rng, 3)
        draws, own = Draws(rows, B, K), tensors(parts, logits=logits)
        cut = accept._run("truncate", own, draws.of(("temperature", "top_k", "top_p", "min_p")))["threshold"].read()
        for b, p in enumerate(params):
            for m in range(3):
                z = (logits[b, m] - logits[b, m].max()) / max(p.temperature, 1e-5)
                kept, reference = z >= cut[b, m], oracle.distribution(logits[b, m], p) > 0
                if not p.is_greedy:
                    # An entry next to the edge of the mass may fall on either side; nothing else may.
                    mass = np.exp(z.astype(np.float64)) / np.exp(z.astype(np.float64)).sum()
                    assert mass[kept != reference & (mass > 1e-30)].sum() < 1e-5 + (p.top_p < 1) * mass[reference].min()
                    assert not (p.top_p == 1 and (kept & (mass > 1e-30) != reference & (mass > 1e-30)).any())


def test_truncation_in_torch(small_bundle: Path) -> None:
    """The stages in torch eager give the thresholds of the graph."""
    parts, rng = open_parts(small_bundle), np.random.default_rng(5)
    logits = random_logits(rng, 2)
    draws = Draws({i: Sampled(p, 0, 9) for i, p in enumerate(PARAMS[2:6])}, B, K)
    inputs = draws.of(("temperature", "top_k", "top_p", "min_p"))
    ours = Acceptance(parts.engine)._run("truncate", tensors(parts, logits=logits), inputs)["threshold"].read()
    expected = truncate.Truncate()(torch.from_numpy(logits), *(torch.from_numpy(values) for values in inputs.values()))
    np.testing.assert_allclose(ours, expected.numpy(), atol=2e-6)


def judge(logits: Array, tokens: Array, count: int, q: Array, params: SamplingParams, draws: Draws, b: int) -> tuple[int, set[int]]:
    """Return the accepted count and the possible next tokens of one request, in float64; -1 where a decision is within rounding."""
    p = [oracle.distribution(row, params) for row in logits]
    accepted = 0
    while accepted < count:
        token = tokens[accepted + 1]
        left, right = float(draws.accept_uniform[b, accepted]) * float(q[accepted, token]), p[accepted][token]
        if abs(left - right) < 1e-6 and not params.is_greedy:
            return -1, set()
        if left >= right:
            break
        accepted += 1
    weights = p[accepted]
    if accepted < count:
        rest = np.maximum(weights - q[accepted], 0)
        weights = rest if rest.sum() > 1e-8 else weights
    return accepted, invert(weights, float(draws.next_uniform[b]))[0]


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("first", range(0, len(PARAMS), B))
def test_rejection_sampling(small_bundle: Path, rows: int, first: int) -> None:
    """Accepted counts and next tokens equal a float64 loop, proposals drawn near p so that all counts occur; cold rows beside warm ones."""
    parts, rng = open_parts(small_bundle), np.random.default_rng(rows)
    accept, params = Acceptance(parts.engine), (PARAMS * 2)[first : first + B]
    seen, skipped = set(), 0
    for trial in range(12):
        logits, counts = random_logits(rng, rows), rng.integers(0, rows, B)
        draws = Draws({i: Sampled(p, trial, 9) for i, p in enumerate(params)}, B, K)
        q, drafted = np.zeros((B, K, V), np.float32), rng.integers(0, V, (B, K + 1))
        for b, p in enumerate(params):
            for k in range(min(K, rows)):
                noisy = logits[b, k] + rng.standard_normal(V).astype(np.float32) * rng.choice([0.0, 0.3, 3.0])
                q[b, k] = oracle.distribution(noisy, SamplingParams(temperature=p.temperature))
                drafted[b, k + 1] = rng.choice(V, p=q[b, k] / q[b, k].astype(np.float64).sum())
        own = tensors(parts, logits=logits, tokens=drafted, q=q)
        chosen = accept.sampled(Rows(VIEW, own["logits"]), counts, draws, own["tokens"], own["q"])
        for b, p in enumerate(params):
            accepted, following = judge(logits[b], drafted[b], counts[b], q[b], p, draws, b)
            if accepted < 0:
                skipped += 1
                continue
            assert chosen.accepted[b] == accepted
            assert chosen.next_token[b] in following
            seen.add(accepted)
        if not draws.truncates:
            names = ("temperature", "accept_uniform", "next_uniform")
            temperature, accept_uniform, next_uniform = (torch.from_numpy(v) for v in draws.of(names).values())
            judged = (torch.from_numpy(v) for v in (logits, drafted, counts, q))
            eager = AcceptSampled()(*judged, temperature, torch.full((B, rows), -np.inf), accept_uniform, next_uniform)
            np.testing.assert_array_equal(eager[0].numpy(), chosen.accepted)
    assert skipped < 6
    assert rows == 1 or len(seen) > min(2, rows - 1)


@pytest.mark.parametrize("vocabulary", [5, 128, 129, 1000, 151936])
def test_draw_is_inverse_cdf(vocabulary: int) -> None:
    """The two-level sum chooses what one exact sum chooses; an entry of weight zero is never chosen, at the ends of the range either."""
    rng = np.random.default_rng(vocabulary)
    weights = rng.random((64, vocabulary)).astype(np.float32) ** 8
    weights[:, rng.random(vocabulary) < 0.5] = 0
    weights[:, -1] = weights[:, 0] = 0
    weights[:, 2] += 1e-3
    uniform = rng.random(64).astype(np.float32)
    uniform[:3] = 0.0, 1 - 2**-24, 0.5
    drawn = choice.draw(torch.from_numpy(weights), torch.from_numpy(uniform)).numpy()
    for row, u, token in zip(weights, uniform, drawn, strict=True):
        assert row[token] > 0
        assert token in invert(row.astype(np.float64), float(u))[0]


def test_draw_reaches_the_far_end() -> None:
    """Small weights behind a large one keep their share: a single float32 sum would lose them all."""
    weights = torch.zeros(1, 151936)
    weights[0, 0], weights[0, 1:] = 1.0, 2e-8
    share = float(weights[0, 1:].double().sum() / weights.double().sum())
    uniform = torch.linspace(0, 1 - 2**-24, 4001)
    drawn = choice.draw(weights.expand(4001, -1), uniform)
    assert abs(float((drawn > 0).double().mean()) - share) < 1e-3
    assert np.cumsum(weights[0].numpy(), dtype=np.float32)[-1] == 1


def test_logprobs(small_bundle: Path) -> None:
    """Of the emitted tokens and the most likely ones, from unprocessed logits."""
    parts, rng = open_parts(small_bundle), np.random.default_rng(0)
    accept, logits, tokens = Acceptance(parts.engine), random_logits(rng, 8), rng.integers(0, V, (B, 8))
    tokens[:, 1:4] = logits.argmax(-1)[:, :3]
    own = tensors(parts, logits=logits, tokens=tokens)
    chosen = accept.greedy(Rows(VIEW, own["logits"]), np.full(B, 7), own["tokens"])
    assert set(chosen.accepted) >= {3}
    ours, top, top_tokens = accept.logprobs(Rows(VIEW, own["logits"]), chosen)
    reference = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for b in range(B):
        emitted: Sequence[int] = [*tokens[b, 1 : 1 + chosen.accepted[b]], chosen.next_token[b]]
        np.testing.assert_allclose(ours[b, : len(emitted)], [reference[b, i, t] for i, t in enumerate(emitted)], atol=1e-5)
        for i in range(8):
            np.testing.assert_allclose(top[b, i], np.sort(reference[b, i])[::-1][:20], atol=1e-5)
            np.testing.assert_allclose(top[b, i], reference[b, i][top_tokens[b, i]], atol=1e-5)
