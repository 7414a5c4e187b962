"""The acceptance steps in torch: how many proposals stand, and which token follows. They hold no weights.

With count 0 they choose the first token after a prefill and every token of plain decoding, so that plain and speculative decoding choose
by one definition. B batch rows, M logit rows, K proposals, V vocabulary rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.export.choice import draw, greedy_choice, one_hot, scaled, take_row
from dspark.runtime.sampling import COLD

_NO_MASS = 1e-8


class Accept(nn.Module):
    """Greedy acceptance: a proposal stands if it is the target's choice."""

    def forward(self, logits: Tensor, verify_tokens: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return `accepted [B]` and `next_token [B]`.

        Row i of `logits [B,M,V]` judges proposal i + 1 of `verify_tokens [B,K+1]`; only the first `count [B]` (at most M - 1)
        proposals are judged.
        """
        choice = greedy_choice(logits)
        accepted = _leading(choice == _following(logits, verify_tokens), count)
        return accepted, choice.gather(1, accepted[:, None])[:, 0]


class AcceptSampled(nn.Module):
    """Rejection sampling: the tokens follow the target's distribution, whatever distribution proposed them."""

    def forward(
        self,
        logits: Tensor,
        verify_tokens: Tensor,
        count: Tensor,
        draft_probs: Tensor,
        temperature: Tensor,
        threshold: Tensor,
        accept_uniform: Tensor,
        next_uniform: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return `accepted [B]` and `next_token [B]`; as in `Accept`, but a proposal stands with probability min(1, p/q).

        `draft_probs [B,K,V]` is the distribution q that each proposal was drawn from. p is the softmax of `logits` at `temperature [B]`
        over the entries that are not below `threshold [B,M]` (see `truncate`). Behind a rejection the next token is drawn from the
        positive part of p - q, else from p. Leviathan et al. 2023, arXiv 2211.17192, appendix A.
        """
        cold, choice, following = temperature < COLD, greedy_choice(logits), _following(logits, verify_tokens)
        z = scaled(logits, temperature)
        weights = torch.exp(z) * (z >= threshold[..., None]).to(torch.float32)
        mass = weights.sum(-1)
        column = _rows(logits).clamp(max=draft_probs.shape[1] - 1)
        p = torch.where(cold[:, None], (choice == following).to(torch.float32), _entries(weights, following) / mass)
        q = _entries(draft_probs, verify_tokens[:, 1:])[:, column]
        accepted = _leading(accept_uniform[:, column] * q < p, count)

        p_row = take_row(weights, accepted) / take_row(mass[..., None], accepted)
        p_row = torch.where(cold[:, None], one_hot(choice.gather(1, accepted[:, None])[:, 0], logits.shape[-1]), p_row)
        q_row = take_row(draft_probs, accepted.clamp(max=draft_probs.shape[1] - 1)) * (accepted < count)[:, None].to(torch.float32)
        residual = torch.relu(p_row - q_row)
        weights = torch.where(residual.sum(-1, keepdim=True) > _NO_MASS, residual, p_row)
        return accepted, draw(weights, next_uniform)


class Logprobs(nn.Module):
    """Log-probabilities under the target, at temperature 1 and before any processing of logits."""

    def __init__(self, top: int) -> None:
        super().__init__()
        self.top = top

    def forward(self, logits: Tensor, verify_tokens: Tensor, accepted: Tensor, next_token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `logprobs [B,M]` of the tokens that a round emits, and the largest `top_logprobs`, `top_tokens [B,M,L]` of each row.

        Row i is that of proposal i + 1 for i below `accepted [B]`, of `next_token [B]` for i equal to it; rows behind mean nothing.
        """
        emitted = torch.where(_rows(logits) < accepted[:, None], _following(logits, verify_tokens), next_token[:, None])
        normed = logits - logits.amax(-1, keepdim=True)
        normaliser = torch.exp(normed).sum(-1, keepdim=True).log()
        values, tokens = torch.topk(normed, self.top, -1)
        return _entries(normed, emitted) - normaliser[..., 0], values - normaliser, tokens


def _rows(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], device=logits.device)


def _following(logits: Tensor, verify_tokens: Tensor) -> Tensor:
    """Return the proposal that each row of `logits` judges `[B,M]`; behind the last one any token."""
    return verify_tokens[:, (_rows(logits) + 1).clamp(max=verify_tokens.shape[1] - 1)]


def _leading(stands: Tensor, count: Tensor) -> Tensor:
    """Return the number of leading true entries of `stands [B,M]` among the first `count [B]`."""
    rows = torch.arange(stands.shape[1], device=stands.device)
    return torch.where(stands & (rows < count[:, None]), stands.shape[1], rows).amin(-1)


def _entries(x: Tensor, index: Tensor) -> Tensor:
    """Return the entry `index[b,i]` of each row `x[b,i]`."""
    return x.gather(-1, index[..., None])[..., 0]
