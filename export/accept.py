"""The greedy acceptance step in torch: compare proposals with the target's choices, count the accepted prefix, choose the next token.

Holds no weights. B batch rows, M logit rows, K proposals, V vocabulary rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.export.layers import greedy_choice


class Accept(nn.Module):
    """Greedy acceptance; with count 0 it only chooses the next token, as after prefill and in plain decoding."""

    def forward(self, logits: Tensor, verify_tokens: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return `accepted [B]` and `next_token [B]`.

        Row i of `logits [B,M,V]` judges proposal i + 1 of `verify_tokens [B,K+1]`; only the first `count [B]` (at most M - 1)
        proposals are judged.
        """
        choice = greedy_choice(logits)
        rows = torch.arange(logits.shape[1], device=logits.device)
        following = verify_tokens[:, (rows + 1).clamp(max=verify_tokens.shape[1] - 1)]
        agrees = (choice == following) & (rows < count[:, None])
        accepted = torch.where(agrees, logits.shape[1], rows).amin(-1)
        return accepted, choice.gather(1, accepted[:, None])[:, 0]
