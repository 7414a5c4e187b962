"""The drafter's heads: the Markov walk (none, vanilla, gated, rnn) and the confidence head.

Row k of a block is corrected by a bias that depends on the token chosen for row k - 1 (the anchor for k = 0). Sums in float32.
B batch rows, H hidden size, V vocabulary rows, C candidate tokens of a row (V where all are), r Markov rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.export.layers import Linear
from dspark.runtime.config import DrafterConfig


class MarkovHead(nn.Module):
    """Bias of the next row's logits, from the previous token and, for `gated` and `rnn`, the hidden row."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank, hidden, self.kind = config.markov_rank, config.hidden_size, config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = Linear(rank, config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = Linear(2 * rank + hidden, 3 * rank)

    def forward(self, embedded: Tensor, hidden: Tensor, *state: Tensor, candidates: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the bias `[B,C]` in float32 and, for `rnn`, the state `[B,r]` for the next row; it begins at zeros.

        `embedded [B,r]` is the previous token's row of `markov_w1`, `hidden [B,H]` the block row after the final norm, `candidates [B,C]`
        the tokens whose bias is asked for (default: all).
        """
        mixed, next_state = embedded, ()
        if self.kind == "gated":
            mixed = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1))) * embedded
        if self.kind == "rnn":
            gate, candidate, output = self.joint_proj(torch.cat([*state, embedded, hidden], -1)).chunk(3, -1)
            keep = torch.sigmoid(gate)
            next_state = (keep * state[0] + (1 - keep) * torch.tanh(candidate),)
            mixed = torch.tanh(output)
        if candidates is None:
            return (self.markov_w2(mixed).float(), *next_state)
        rows = F.embedding(candidates, self.markov_w2.weight)
        return ((rows @ mixed[..., None])[..., 0].float(), *next_state)


class ConfidenceHead(nn.Module):
    """Logit of the probability that row k is accepted given that all earlier rows were."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        size = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = Linear(size, 1, bias=config.confidence_head_bias)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """Return `[B,1]` in float32 from the hidden row and, if configured, the previous token's `markov_w1` row."""
        features = torch.cat([hidden, embedded], -1) if self.with_markov else hidden
        return self.proj(features, torch.float32)


def corrected(
    markov: MarkovHead | None,
    confidence: ConfidenceHead | None,
    base: Tensor,
    hidden: Tensor,
    previous: Tensor,
    *state: Tensor,
    candidates: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the corrected logits `[B,C]` of one row, the confidence logit `[B,1]` if there is that head, and the next state if any.

    `base [B,C]` float32 logits (of the tokens `candidates [B,C]`, default all), `hidden [B,H]` the row after the final norm,
    `previous [B]` the token before, `state [B,r]` for `rnn` only.
    """
    embedded, logits, scores = None, base, ()
    if markov is not None:
        embedded = markov.markov_w1(previous)
        bias, *state = markov(embedded, hidden, *state, candidates=candidates)
        logits = base + bias
    if confidence is not None:
        scores = (confidence(hidden, embedded),)
    return (logits, *scores, *state)
