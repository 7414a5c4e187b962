"""Sampled drafting: distributions and tokens of every head against the oracle, cold rows beside warm ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle
import pytest
from conftest import GOLDEN, Export
from engines import open_parts

from dspark.runtime.sampling import Draws, Sampled, SamplingParams

TEMPERATURES = (1.0, 0.0, 0.6)


@pytest.mark.parametrize(("folder", "topk"), [("vanilla", None), ("gated", None), ("rnn", None), ("dflash", None), ("vanilla", 4)])
def test_distributions_follow_the_sampled_tokens(export: Export, folder: str, topk: int | None) -> None:
    """Case C2: q at row k is the softmax of the logits corrected by the token drawn at row k - 1; the next is drawn from it."""
    directory = GOLDEN / folder
    cut = {} if topk is None else {"markov_topk": topk}
    parts = open_parts(export(directory, ctx_window="full", debug_outputs=True, **cut))
    own = oracle.Drafter(directory / "drafter", topk)
    k, width = parts.engine.manifest.num_speculative_tokens, parts.engine.manifest.drafter.taps_width
    rng, deviating = np.random.default_rng(0), 0
    contexts = [rng.standard_normal((n, width)).astype(np.float32) for n in (5, 9, 7)]
    for name, taps in enumerate(contexts):
        parts.slots.admit(name)
        parts.drafter.write_context(name, taps, np.arange(len(taps)))
    greedy = parts.drafter.propose([0, 1, 2], [3, 4, 5])
    greedy_tokens, confidence = greedy.tokens().copy(), greedy.confidence_logits
    assert greedy.draft_probs is None
    for seed in range(12):
        rows = {i: Sampled(SamplingParams(temperature=t), seed, len(contexts[i])) for i, t in enumerate(TEMPERATURES)}
        draws = Draws(rows, 4, k)
        drafted = parts.drafter.propose([0, 1, 2], [3, 4, 5], draws=draws)
        assert drafted.draft_probs is not None
        tokens, q = drafted.tokens(), drafted.draft_probs.read()
        for i, temperature in enumerate(TEMPERATURES):
            taps, anchor = contexts[i], 3 + i
            reference = own.draft(taps, np.arange(len(taps)), anchor, len(taps), tokens[i].tolist())
            np.testing.assert_allclose(drafted.debug["draft_logits"].read()[i], reference["logits"], atol=1e-4)
            if confidence is not None and drafted.confidence_logits is not None:
                np.testing.assert_allclose(drafted.confidence_logits.read()[i], reference["confidence_logits"], atol=1e-4)
            for row in range(k):
                # From the graph's own float32 logits, so that their rounding does not count.
                logits = drafted.debug["draft_logits"].read()[i, row]
                expected = oracle.distribution(logits, SamplingParams(temperature=temperature))
                np.testing.assert_allclose(q[i, row], expected, atol=1e-6)
                assert q[i, row, tokens[i, row]] > 0
                sums, u = np.cumsum(expected), float(draws.draft_uniform[i, row])
                token = tokens[i, row]
                assert sums[token] - expected[token] - 2e-6 <= u <= sums[token] + 2e-6 or temperature == 0
            deviating += int((tokens[i] != greedy_tokens[i]).any()) if temperature else 0
            assert temperature or (tokens[i] == greedy_tokens[i]).all()
    assert deviating > 12, "samples differ from the greedy draft"


def test_all_cold_is_the_greedy_draft(small_bundle: Path) -> None:
    """Rows of temperature 0 alone run the graph without distributions."""
    parts, ran = open_parts(small_bundle), []
    bind = parts.engine.bind
    parts.engine.bind = lambda graph, tensors: ran.append(graph) or bind(graph, tensors)
    parts.slots.admit("r")
    proposals = parts.drafter.propose(["r"], [3], draws=Draws({0: Sampled(SamplingParams(top_p=0.5), 1, 0)}, 1, 7))
    assert (ran, proposals.draft_probs) == (["draft"], None)
