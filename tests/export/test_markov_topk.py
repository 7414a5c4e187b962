"""Proposing from the likeliest tokens before the Markov correction, in torch, against numpy. The graphs are test_draft_sampled's."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from conftest import GOLDEN

from dspark.export.drafter import Drafter
from dspark.export.pair import load_pair
from dspark.export.verify import load_weights
from dspark.runtime.sampling import SamplingParams

TOPK = 3


HIDDEN = oracle.Drafter(GOLDEN / "vanilla" / "drafter").config["hidden_size"]


def drafter(folder: str, topk: int | None) -> Drafter:
    pair = load_pair(GOLDEN / folder / "target", GOLDEN / folder / "drafter")
    model = Drafter(pair.drafter, pair.drafter.block_size, 64, debug_outputs=True, markov_topk=topk)
    load_weights("drafter", model, pair.drafter_tensors, None)
    return model.requires_grad_(False)


@pytest.mark.parametrize("folder", ["vanilla", "gated", "rnn"])
def test_walks(folder: str) -> None:
    """Greedy and drawn tokens, corrected logits, distributions and confidence of every head."""
    own = oracle.Drafter(GOLDEN / folder / "drafter", TOPK)
    whole, block, size = oracle.Drafter(GOLDEN / folder / "drafter"), own.config["block_size"], own.config["hidden_size"]
    rng, changed, model = np.random.default_rng(0), 0, drafter(folder, TOPK)
    for seed in range(8):
        x = torch.from_numpy(rng.standard_normal((2, block, size)).astype(np.float32))
        anchor, uniform = torch.tensor([3, 5]), torch.from_numpy(rng.random((2, block), np.float32))
        tokens, confidence, hidden, logits = model.heads(x, anchor)
        drawn, _, probs, _, drawn_logits = model.heads(x, anchor, torch.tensor([0.7, 0.0]), uniform)
        for b in range(2):
            expected = own.walk(hidden[b].double().numpy(), int(anchor[b]))
            assert tokens[b, 1:].tolist() == expected["tokens"].tolist()
            np.testing.assert_allclose(logits[b], expected["logits"], atol=1e-5)
            np.testing.assert_allclose(confidence[b], expected["confidence_logits"], atol=1e-5)
            assert (logits[b].isfinite().sum(-1) == TOPK).all()
            changed += whole.walk(hidden[b].double().numpy(), int(anchor[b]))["tokens"].tolist() != expected["tokens"].tolist()
        assert drawn[1].tolist() == tokens[1].tolist(), seed
        expected = own.walk(hidden[0].double().numpy(), 3, drawn[0, 1:].tolist())
        np.testing.assert_allclose(drawn_logits[0], expected["logits"], atol=1e-5)
        for row in range(block):
            law = oracle.distribution(expected["logits"][row], SamplingParams(temperature=0.7))
            np.testing.assert_allclose(probs[0, row], law, atol=1e-6)
            assert (law > 0).sum() == TOPK
            token, u = int(drawn[0, 1 + row]), float(uniform[0, row])
            assert np.cumsum(law)[token] - law[token] - 1e-5 <= u <= np.cumsum(law)[token] + 1e-5
    assert changed, "candidates that never matter would show nothing"


def test_all_tokens_as_candidates_is_the_whole_walk() -> None:
    x, anchor, model = torch.randn(2, 7, HIDDEN), torch.tensor([1, 2]), drafter("vanilla", None)
    for ours, theirs in zip(model.heads(x, anchor), drafter("vanilla", model.config.vocab_size).heads(x, anchor), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_of_equal_logits_the_lowest_token_is_chosen() -> None:
    """As without candidates, whatever order the engine's top-k gives equal entries in."""
    model = drafter("vanilla", 4)
    model.markov_head.markov_w2.weight.zero_()
    candidates = torch.tensor([[2, 5, 6, 9]])
    token, logits, *_ = model.step(torch.tensor([[0.0, 3.0, 3.0, 1.0]]), torch.zeros(1, HIDDEN), candidates, torch.tensor([1]))
    assert token.tolist() == [5]
    assert logits[0, candidates[0]].tolist() == [0, 3, 3, 1]
