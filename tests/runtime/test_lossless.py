"""Sampling is lossless: what is emitted follows the target's distribution, whatever distribution proposed it.

With fixed seeds, and with negative controls: a decoder that is wrong in a known way fails the same test. Greedy losslessness is
test_decode's and test_ragged's.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import PAIR, Export
from engines import open_parts
from random_pair import Shape, write_pair

from dspark.runtime import LLM, SamplingParams, sampling
from dspark.runtime.accept import Acceptance
from dspark.runtime.sampling import Draws
from dspark.runtime.state import Rows, View
from dspark.runtime.streams import Purpose

V, K, TOKENS = 8, 3, 3
BATCH, DRAWS = 512, 51200
TINY = Shape(
    hidden=16,
    intermediate=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    tied=False,
    taps=(0,),
    vocabulary=V,
    drafter_layers=1,
    block=K,
    rank=4,
    positions=64,
    mask=7,
)
Array = np.ndarray


def chi_square(counts: Array, law: Array) -> float:
    """Return the p-value of counts under a law; cells expected less than 5 times are one."""
    expected, counts = law.ravel() * counts.sum(), counts.ravel()
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    if expected[-1] < 1e-9:
        assert counts[-1] == 0, "a token of probability zero"
        expected, counts = expected[:-1], counts[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


TINY_OPTIONS = {"max_batch_size": BATCH, "ctx_window": 16}


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_pair(directory, TINY, dtype="fp32", deviation=0.4)
    return directory


@pytest.fixture(scope="module")
def tiny(tiny_pair: Path, export: Export) -> Path:
    """A bundle of 8 tokens and 3 proposals that takes 512 requests at once."""
    return export(tiny_pair, **TINY_OPTIONS)


class Rounds:
    """Decodes TOKENS tokens of many independent requests by the acceptance graph, from fixed distributions.

    Row i of `p` and `q` are the logits of target and drafter at token i; requests are in their rounds independently of each other.
    """

    def __init__(self, bundle: Path, p: Array, q: Array) -> None:
        self._engine, self._p, self._q = open_parts(bundle, slots=1).engine, p, q
        self._accept = Acceptance(self._engine)
        sizes = {"logits": (BATCH, K + 1, V), "draft_probs": (BATCH, K, V), "tokens": (BATCH, K + 1)}
        self._tensors = {n: self._engine.allocate(s, "int64" if n == "tokens" else "float32") for n, s in sizes.items()}

    def run(self, params: SamplingParams, seed: int, change: Callable[[Draws, Array], Array]) -> Array:
        """Return `[BATCH, TOKENS]`; `change` may spoil the draws and returns the distributions that acceptance is told."""
        streams = [np.random.default_rng((seed, purpose)) for purpose in range(3)]
        position, out = np.zeros(BATCH, int), np.zeros((BATCH, TOKENS), int)
        while (position < TOKENS).any():
            draws = Draws({}, BATCH, K)
            draws.temperature[:], draws.top_p[:], draws.min_p[:] = params.temperature, params.top_p, params.min_p
            draws.top_k[:] = params.top_k or V
            draws.any, draws.truncates = True, bool(params.top_k or params.top_p < 1 or params.min_p)
            for name, shape, stream in zip(("draft", "accept", "next"), ((BATCH, K), (BATCH, K), BATCH), streams, strict=True):
                setattr(draws, f"{name}_uniform", stream.random(shape, np.float32))
            rows = np.minimum(position[:, None] + np.arange(K + 1), TOKENS)
            logits = self._q[rows[:, :K]].astype(np.float64) / params.temperature
            q = np.exp(logits - logits.max(-1, keepdims=True))
            q = (q / q.sum(-1, keepdims=True)).astype(np.float32)
            told = change(draws, q)
            sums = np.cumsum(q, -1, dtype=np.float64)
            tokens = np.zeros((BATCH, K + 1), np.int64)
            tokens[:, 1:] = (sums <= draws.draft_uniform[..., None] * sums[..., -1:]).sum(-1)
            for name, value in (("logits", self._p[rows]), ("draft_probs", told), ("tokens", tokens)):
                self._tensors[name].write(value)
            chosen = self._accept.sampled(
                Rows(View(0, BATCH, tuple(range(BATCH))), self._tensors["logits"]),
                np.full(BATCH, K),
                draws,
                self._tensors["tokens"],
                self._tensors["draft_probs"],
            )
            for b in range(BATCH):
                emitted = [*tokens[b, 1 : 1 + chosen.accepted[b]], chosen.next_token[b]][: TOKENS - position[b]]
                out[b, position[b] : position[b] + len(emitted)] = emitted
                position[b] += len(emitted)
        return out


def faithful(_draws: Draws, q: Array) -> Array:
    return q


def wrong_temperature(_draws: Draws, q: Array) -> Array:
    told = q**2
    return told / told.sum(-1, keepdims=True)


def one_stream(draws: Draws, q: Array) -> Array:
    draws.accept_uniform = draws.draft_uniform
    return q


CUTS = ({}, {"top_p": 0.9}, {"top_k": 4})
SETTINGS = [{"temperature": t, **cut} for t in (0.5, 1.0, 1.5) for cut in CUTS]
SETTINGS.append({"temperature": 0.5, "top_k": 6, "top_p": 0.95, "min_p": 0.02})


def law_and_counts(bundle: Path, settings: dict[str, Any], change: Callable[[Draws, Array], Array]) -> tuple[Array, Array]:
    rng, params = np.random.default_rng(7), SamplingParams(**settings)
    p, q = (rng.standard_normal((TOKENS + 1, V)).astype(np.float32) * 1.2 for _ in range(2))
    rounds = Rounds(bundle, p, q)
    tokens = np.concatenate([rounds.run(params, i, change) for i in range(DRAWS // BATCH)])
    counts = np.zeros((V,) * TOKENS)
    np.add.at(counts, tuple(tokens.T), 1)
    a, b, c = (oracle.distribution(row, params) for row in p[:TOKENS])
    return np.einsum("a,b,c->abc", a, b, c), counts


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_fixed_distributions(tiny: Path, settings: dict[str, Any]) -> None:
    """Case E1: 51,200 requests of three tokens. The joint law by chi-square, each token's by total variation."""
    law, counts = law_and_counts(tiny, settings, faithful)
    assert chi_square(counts, law) > 1e-3
    for axes in itertools.combinations(range(TOKENS), TOKENS - 1):
        assert np.abs(counts.sum(axes) / DRAWS - law.sum(axes)).sum() / 2 < 0.01


@pytest.mark.parametrize("change", [wrong_temperature, one_stream])
def test_wrong_decoders_are_noticed(tiny: Path, change: Callable[[Draws, Array], Array]) -> None:
    """The same test fails for a q of another temperature, and for one stream that both drafts and accepts."""
    law, counts = law_and_counts(tiny, {"temperature": 1.0}, change)
    assert chi_square(counts, law) < 1e-3


def joint_law(target: Any, prompt: list[int], params: SamplingParams, tokens: int) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation of `tokens` tokens, by recomputing the target for each prefix."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        law = {
            (*prefix, token): mass * share
            for prefix, mass in law.items()
            for token, share in enumerate(oracle.distribution(target.forward([*prompt, *prefix])[0][-1], params))
            if share > 0
        }
    return law


def outputs_law(llm: LLM, prompt: list[int], settings: dict[str, Any], seeds: range, law: dict[tuple[int, ...], float]) -> float:
    """Return the p-value of the outputs of many seeds under a law."""
    params = [SamplingParams(**settings, seed=seed, max_tokens=TOKENS, ignore_eos=True) for seed in seeds]
    cells = {cell: i for i, cell in enumerate(law)}
    counts = np.zeros(len(cells))
    for output in llm.generate([prompt] * len(seeds), params):
        assert tuple(output.token_ids) in cells, "a token of probability zero"
        counts[cells[tuple(output.token_ids)]] += 1
    return chi_square(counts, np.array(list(law.values())))


class BundleTarget:
    """The target of a bundle, fed every prefix whole: what decoding must be lossless against where its weights are quantised."""

    def __init__(self, bundle: Path) -> None:
        self._parts, self._names = open_parts(bundle, slots=1), itertools.count()

    def forward(self, tokens: list[int]) -> tuple[Array, None]:
        """Return logits `[1, V]` of the last token."""
        name = next(self._names)
        self._parts.slots.admit(name)
        logits = self._parts.target.prefill(name, tokens).logits.tensor.read()[0].copy()
        self._parts.target.release(name)
        self._parts.slots.release(name)
        return logits, None


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"temperature": 1.0}, {}),
        ({"temperature": 0.6, "top_k": 5, "top_p": 0.95}, {}),
        ({"temperature": 1.0}, {"weights": "int4"}),
        pytest.param({"temperature": 1.0}, {"weights": "int8"}, marks=pytest.mark.slow),
        pytest.param({"temperature": 1.0}, {"markov_topk": 3}, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.6, "top_k": 5}, {"markov_topk": 2, "weights": "int4"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_tiny_pair_end_to_end(tiny_pair: Path, export: Export, settings: dict[str, Any], options: dict[str, Any]) -> None:
    """Drafting, Markov walk, verification and acceptance in graphs, 512 requests at once: the joint law of three tokens, 512 cells."""
    prompt, bundle = [1, 2, 3, 4], export(tiny_pair, **TINY_OPTIONS, **options)
    target = BundleTarget(bundle) if "weights" in options else oracle.Target(tiny_pair / "target")
    law = joint_law(target, prompt, SamplingParams(**settings), TOKENS)
    assert outputs_law(LLM(bundle), prompt, settings, range(4096), law) > 1e-3


def q_of_another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft at twice the temperature that the acceptance is told the distributions of."""
    sampled = Acceptance.sampled

    def wrong(self: Acceptance, logits: Any, counts: Any, draws: Any, tokens: Any = None, probs: Any = None) -> Any:
        if probs is not None:
            told = probs.read() ** 2
            probs.write(told / told.sum(-1, keepdims=True))
        return sampled(self, logits, counts, draws, tokens, probs)

    monkeypatch.setattr(Acceptance, "sampled", wrong)


def one_stream_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept by the numbers that drafted."""
    uniforms = sampling.uniforms
    used = {Purpose.ACCEPT: Purpose.DRAFT}
    monkeypatch.setattr(sampling, "uniforms", lambda seed, purpose, *where: uniforms(seed, used.get(purpose, purpose), *where))


@pytest.mark.parametrize("spoil", [q_of_another_temperature, one_stream_for_both])
def test_wrong_decoders_are_noticed_end_to_end(tiny: Path, tiny_pair: Path, spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails for them."""
    prompt, settings = [1, 2, 3, 4], {"temperature": 1.0}
    law = joint_law(oracle.Target(tiny_pair / "target"), prompt, SamplingParams(**settings), TOKENS)
    spoil(monkeypatch)
    assert outputs_law(LLM(tiny), prompt, settings, range(4096), law) < 1e-3


@pytest.mark.parametrize("speculative", [True, False])
def test_the_example_pair_end_to_end(pair_bundle: Path, speculative: bool) -> None:
    """top_k = 4 at temperature 1.5: the joint law of the first three tokens, 64 cells."""
    line = json.loads((PAIR / "prompts" / "prose.jsonl").read_text().splitlines()[0])
    settings, prompt = {"temperature": 1.5, "top_k": 4}, line["ids"][:8]
    law = joint_law(oracle.Target(PAIR / "target"), prompt, SamplingParams(**settings), TOKENS)
    assert len(law) == 64
    assert outputs_law(LLM(pair_bundle, speculative=speculative), prompt, settings, range(2048), law) > 1e-3
