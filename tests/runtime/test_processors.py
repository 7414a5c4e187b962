"""Penalties, bias, allowed tokens and log-probabilities: the processor against a plain reading of vLLM's rules, and whole outputs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from conftest import PAIR

from dspark.runtime import LLM, SamplingParams
from dspark.runtime.errors import RequestError
from dspark.runtime.processors import LogitsProcessor
from dspark.runtime.streams import Purpose, uniforms

V = 40


def expected(row: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], stops: list[int]) -> np.ndarray:
    """Apply the rules one token at a time."""
    row, counts = row.astype(np.float64).copy(), Counter(output)
    for token in range(len(row)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            row[token] = -np.inf
        if len(output) < params.min_tokens and token in stops:
            row[token] = -np.inf
        row[token] += (params.logit_bias or {}).get(token, 0)
        if token in prompt or counts[token]:
            row[token] *= params.repetition_penalty if row[token] <= 0 else 1 / params.repetition_penalty
        row[token] -= params.frequency_penalty * counts[token] + params.presence_penalty * (counts[token] > 0)
    return row


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7, "presence_penalty": 0.4},
        {"frequency_penalty": -0.5},
        {"logit_bias": {3: 5.0, 7: -2.5}},
        {"allowed_token_ids": [1, 2, 3, 30]},
        {"min_tokens": 6},
        {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {2: 1}, "min_tokens": 8},
    ],
    ids=str,
)
def test_rows_of_a_block(fields: dict[str, Any]) -> None:
    """Row i is judged behind the output and the proposals before it."""
    rng, params = np.random.default_rng(1), SamplingParams(**fields)
    prompt, output, proposals = [5, 6, 6, 7], [3, 3, 9, 11], [9, 3, 20, 20, 21]
    processor, logits = LogitsProcessor(params, prompt, [2, 9, 500], V), rng.standard_normal((6, V)).astype(np.float32)
    assert processor.active(4)
    ours = logits.copy()
    processor.apply(ours, output, proposals)
    for i, row in enumerate(logits):
        np.testing.assert_allclose(ours[i], expected(row, params, prompt, [*output, *proposals[:i]], [2, 9]), rtol=1e-5)


def test_nothing_to_do() -> None:
    assert not LogitsProcessor(SamplingParams(temperature=0.7, top_p=0.9), [1], [2], V).active(0)
    short = LogitsProcessor(SamplingParams(min_tokens=3), [1], [2], V)
    assert [short.active(n) for n in (0, 2, 3, 9)] == [True, True, False, False]


def lines(kind: str) -> list[list[int]]:
    return [json.loads(line)["ids"] for line in (PAIR / "prompts" / f"{kind}.jsonl").read_text().splitlines()]


FIELDS = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logit_bias": {484: -100.0, 550: 3.0}},
    {"allowed_token_ids": list(range(100, 900))},
    {"repetition_penalty": 1.05, "min_tokens": 30},
]


@pytest.fixture(scope="module")
def llm(pair_bundle: Path) -> LLM:
    return LLM(pair_bundle)


def test_greedy_outputs_are_those_of_plain_decoding(llm: LLM) -> None:
    """Requests with different rules and one without in a batch; two of them against the oracle, token by token."""
    prompts = [lines(kind)[i] for kind in ("math", "prose") for i in range(3)]
    params = [SamplingParams(max_tokens=60, **fields) for fields in [*FIELDS, {}]]
    outputs = llm.generate(prompts, params)
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert output.token_ids == llm.generate([prompt], param, speculative=False)[0].token_ids
        assert output.stats.mean_accepted_length > 1.2
    target = oracle.Target(PAIR / "target")
    for number in (0, 1):
        tokens: list[int] = []
        for token in outputs[number].token_ids[:10]:
            logits = target.forward([*prompts[number], *tokens])[0][-1]
            row = expected(logits, params[number], prompts[number], tokens, llm.end_token_ids)
            assert int(row.argmax()) == token
            tokens.append(token)
    assert outputs[0].token_ids != llm.generate([prompts[0]], SamplingParams(max_tokens=60))[0].token_ids
    assert set(outputs[3].token_ids) <= set(range(100, 900))
    assert outputs[5].token_ids == llm.generate([prompts[5]], SamplingParams(max_tokens=60))[0].token_ids


def test_sampling_among_allowed_tokens(llm: LLM) -> None:
    """Two tokens are allowed at temperature 1: the law of the first two tokens, four cells, is the target's."""
    prompt, allowed = lines("prose")[0][:8], [220, 301]
    params = [SamplingParams(max_tokens=2, temperature=2.0, allowed_token_ids=allowed, ignore_eos=True, seed=seed) for seed in range(1000)]
    counts = Counter(tuple(output.token_ids) for output in llm.generate([prompt] * 1000, params))
    target, law = oracle.Target(PAIR / "target"), {}
    for first in allowed:
        for second in allowed:
            rows = target.forward([*prompt, first])[0][-2:, allowed] / 2.0
            law[first, second] = oracle.softmax(rows[0])[allowed.index(first)] * oracle.softmax(rows[1])[allowed.index(second)]
    assert set(counts) <= set(law)
    assert sum(abs(counts[cell] / 1000 - share) for cell, share in law.items()) / 2 < 0.05


@pytest.mark.parametrize("speculative", [True, False])
def test_logprobs(llm: LLM, speculative: bool) -> None:
    """Each token's own first, then the most likely; unprocessed, whatever the temperature and the penalties; beside a request without."""
    prompt = lines("prose")[1]
    asking = SamplingParams(max_tokens=24, temperature=0.8, seed=5, repetition_penalty=1.1, logprobs=3, ignore_eos=True)
    output, other = llm.generate([prompt, prompt], [asking, SamplingParams(max_tokens=9)], speculative=speculative)
    assert other.logprobs is None
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == 24
    logits = oracle.Target(PAIR / "target").forward([*prompt, *output.token_ids])[0][len(prompt) - 1 : -1]
    reference = np.log(oracle.softmax(logits))
    for row, token, entry in zip(reference, output.token_ids, output.logprobs, strict=True):
        assert next(iter(entry)) == token
        assert set(entry) == {token, *np.argsort(row)[::-1][:3].tolist()}
        np.testing.assert_allclose(list(entry.values()), row[list(entry)], atol=1e-3)
    (chosen,) = llm.generate([prompt], SamplingParams(max_tokens=9, logprobs=0), speculative=speculative)
    assert [list(entry) for entry in chosen.logprobs or []] == [[token] for token in chosen.token_ids]


def test_unknown_tokens_are_refused(llm: LLM) -> None:
    for fields in ({"allowed_token_ids": [1, 99999]}, {"logit_bias": {99999: 1.0}}):
        with pytest.raises(RequestError, match=r"token ids \[99999\] of the sampling parameters are outside the vocabulary"):
            llm.generate([[1]], SamplingParams(**fields))


def test_streams_are_addressed_not_drawn() -> None:
    """A number depends on seed, purpose and position only; the streams have nothing to do with each other, and lie in [0, 1)."""
    numbers = {purpose: uniforms(7, purpose, 0, 20000) for purpose in Purpose}
    for purpose, whole in numbers.items():
        np.testing.assert_array_equal(uniforms(7, purpose, 123, 9), whole[123:132])
        assert whole.dtype == np.float32
        assert 0 <= whole.min() < 1e-3
        assert 1 - 1e-3 < whole.max() < 1
        assert abs(whole.mean() - 0.5) < 0.01
        assert len(set(whole.tolist())) > 19900
    correlations = np.corrcoef([*numbers.values(), uniforms(8, Purpose.DRAFT, 0, 20000), uniforms(2**64 - 1, Purpose.DRAFT, 1, 20000)])
    assert np.abs(correlations - np.eye(5)).max() < 0.03


def test_a_seed_makes_samples_reproducible(llm: LLM) -> None:
    """Alone, beside others, in another slot: the same tokens; another seed gives others."""
    prompt = lines("prose")[2]
    params = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)
    (alone,) = llm.generate([prompt], params)
    others = [SamplingParams(max_tokens=n, temperature=1.2, ignore_eos=True) for n in (3, 50, 12)]
    batch = llm.generate([*lines("code")[:3], prompt], [*others, params])
    assert batch[-1].token_ids == alone.token_ids
    outputs = {tuple(o.token_ids) for o in llm.generate([prompt] * 4, SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True))}
    assert len(outputs) == 4, "without a seed each request has its own"
