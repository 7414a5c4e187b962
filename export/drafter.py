"""The DSpark drafter in torch: write context rows into the rings, run one block, walk the heads.

Parameter names are those of Qwen3DSparkModel. Split in stages like the target, so that one layer is traced. The context stream has
no depth: one projected row per position feeds every layer. B batch rows, N new context rows, T block rows, K proposals,
R ring capacity, m tapped layers, H hidden size, V vocabulary rows, C candidate tokens of a row (V where all are).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from dspark.export.choice import distribution, draw, greedy_choice
from dspark.export.heads import ConfidenceHead, MarkovHead, corrected
from dspark.export.layers import DecoderLayer, Linear, RMSNorm, RotaryPositions
from dspark.export.ops import block_attention, ring_write
from dspark.runtime.config import DrafterConfig

T = TypeVar("T")


class DrafterLayer(DecoderLayer):
    """A Qwen3 layer whose block attends to the ring and, both ways, to itself."""

    def __init__(self, config: DrafterConfig, window: int) -> None:
        super().__init__(config)
        self.window = window

    def write_context(
        self, key_ring: Tensor, value_ring: Tensor, context: Tensor, start: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the rings with the rows of `context [B,N,H]` written; these rows skip `input_layernorm`."""
        rows, attention = context.flatten(0, 1), self.self_attn
        key_ring = ring_write(key_ring, attention.key(rows, cos, sin), start)
        return key_ring, ring_write(value_ring, attention.value(rows, cos), start)

    def draft(self, key_ring: Tensor, value_ring: Tensor, x: Tensor, total: Tensor, first: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output `[B,T,H]` for the block rows `x`."""
        rows, attention = self.input_layernorm(x).flatten(0, 1), self.self_attn
        query, key, value = attention.query(rows, cos, sin), attention.key(rows, cos, sin), attention.value(rows, cos)
        attended = block_attention(query, key_ring, value_ring, key, value, total, first, scale=attention.scale, window=self.window)
        return self.add_output(x, attended, cos)


class Drafter(nn.Module):
    """Qwen3DSparkModel that serves the first K proposals of its block; the backbone always runs all T rows.

    With `markov_topk` each proposal is chosen from the C most likely tokens of its row before the Markov correction, so that of the
    correction's V rows only C are read. What is sampled from, and told to the acceptance, is the distribution over these.
    """

    def __init__(
        self,
        config: DrafterConfig,
        num_speculative_tokens: int,
        window: int,
        *,
        debug_outputs: bool = False,
        markov_topk: int | None = None,
    ) -> None:
        super().__init__()
        self.config, self.k, self.debug_outputs, self.markov_topk = config, num_speculative_tokens, debug_outputs, markov_topk
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = Linear(config.taps_width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config, window) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.rotary = RotaryPositions(config.head_dim, config.rope_theta)
        self.has_state = config.markov_head_type == "rnn"

    def project_context(self, taps: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the context rows `[B,N,H]` of `taps [B,N,m*H]` and the angles of their positions.

        `fc` runs in float32: first-token taps of Qwen3-8B exceed 2e4 and their products overflow float16.
        """
        context = self.hidden_norm(self.fc(taps.flatten(0, 1), torch.float32)).to(taps.dtype)
        context = context.view(*taps.shape[:2], -1)
        positions = start[:, None] + torch.arange(taps.shape[1], device=taps.device)
        return (context, *self.rotary(positions, taps.dtype))

    def embed_block(self, anchor: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block rows `[B,T,H]` (the anchor, then mask tokens) and the angles of positions total..total+T-1."""
        rows = torch.arange(self.config.block_size, device=anchor.device)
        x = self.embed_tokens(torch.where(rows == 0, anchor[:, None], self.config.mask_token_id))
        return (x, *self.rotary(total[:, None] + rows, x.dtype))

    def rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the block after the final norm `[B,T,H]`, then K tensors of each `row_kinds` kind, then the first state, if any."""
        hidden = self.norm(x)
        served = hidden[:, : self.k]
        base = self.lm_head(served.flatten(0, 1)).float().unflatten(0, (-1, self.k))
        kinds = [base, served]
        if self.markov_topk is not None:
            # In ascending order, so that of equal logits the lowest token is chosen as it is without candidates.
            candidates = base.topk(self.markov_topk).indices.sort().values
            kinds = [base.gather(-1, candidates), served, candidates]
        state = (x.new_zeros(x.shape[0], self.config.markov_rank),) if self.has_state else ()
        return (hidden, *(row for kind in kinds for row in kind.unbind(1)), *state)

    @property
    def row_kinds(self) -> tuple[str, ...]:
        """What a step takes of its row: base logits `[B,C]`, the hidden row `[B,H]` and, with `markov_topk`, the candidates `[B,C]`."""
        return ("base", "row") if self.markov_topk is None else ("base", "row", "candidates")

    def step(self, base: Tensor, hidden: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Choose the token of one row: return it `[B]`, then what `corrected` does, its logits over the whole vocabulary.

        `rest`: the candidates, if any; the previous token `[B]`; the state, if any.
        """
        candidates, (previous, *state) = self._split(rest)
        logits, *after = corrected(self.markov_head, self.confidence_head, base, hidden, previous, *state, candidates=candidates)
        return (self._token(greedy_choice(logits), candidates), self._spread(logits, candidates, -torch.inf), *after)

    def step_sampled(self, base: Tensor, hidden: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Draw the token of one row: as `step`, with the distribution `[B,V]` that it was drawn from behind the logits.

        `rest`: the candidates, if any; the previous token, the temperature and the uniform number `[B]`; the state, if any.
        """
        candidates, (previous, temperature, uniform, *state) = self._split(rest)
        logits, *after = corrected(self.markov_head, self.confidence_head, base, hidden, previous, *state, candidates=candidates)
        probs = distribution(logits, temperature)
        token = self._token(draw(probs, uniform), candidates)
        return (token, self._spread(logits, candidates, -torch.inf), self._spread(probs, candidates, 0.0), *after)

    def _split(self, rest: tuple[Tensor, ...]) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        return (None, rest) if self.markov_topk is None else (rest[0], rest[1:])

    def _token(self, choice: Tensor, candidates: Tensor | None) -> Tensor:
        return choice if candidates is None else candidates.gather(1, choice[:, None])[:, 0]

    def _spread(self, values: Tensor, candidates: Tensor | None, elsewhere: float) -> Tensor:
        """Return `values [B,C]` at their tokens in `[B,V]`."""
        if candidates is None:
            return values
        whole = torch.full((values.shape[0], self.config.vocab_size), elsewhere, dtype=values.dtype, device=values.device)
        return whole.scatter(1, candidates, values)

    def collect(self, anchor: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        """Join the K tokens behind the anchor, then K tensors of each further kind, `[B,V]` or `[B,1]`, in order."""
        tokens, *groups = (parts[i : i + self.k] for i in range(0, len(parts), self.k))
        return (torch.stack([anchor, *tokens], 1), *(self._join(group) for group in groups))

    def _join(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.cat(rows, 1) if rows[0].shape[1] == 1 else torch.stack(rows, 1)

    def heads(self, x: Tensor, anchor: Tensor, temperature: Tensor | None = None, uniform: Tensor | None = None) -> tuple[Tensor, ...]:
        """Walk the block and return the outputs of the graph `draft` other than the rings, in the order of its signature.

        With `temperature [B]` and `uniform [B,K]`, those of `draft_sampled`.
        """
        hidden, *rows = self.rows(x)
        sampled = temperature is not None
        state, steps, previous = rows[self.k * len(self.row_kinds) :], [], anchor
        for k in range(self.k):
            drawn = (temperature, uniform[:, k]) if sampled else ()
            step = self.step_sampled if sampled else self.step
            previous, *outputs = step(*self.row(rows, k), previous, *drawn, *state)
            state = outputs[-1:] if self.has_state else []
            steps.append((previous, *outputs))
        return self.joined(self.collect(anchor, *self.parts(steps, sampled=sampled)), hidden)

    def row(self, rows: Sequence[T], k: int) -> list[T]:
        """Return what step k takes of `rows` behind the block: one of each `row_kinds` kind."""
        return [rows[kind * self.k + k] for kind in range(len(self.row_kinds))]

    def parts(self, steps: list[tuple[T, ...]], *, sampled: bool) -> list[T]:
        """Return what `collect` joins, from the outputs of K steps: tokens, confidences, distributions, logits, as far as there are."""
        tokens, logits, *rest = zip(*steps, strict=True)
        probs = rest.pop(0) if sampled else ()
        confidence = rest[0] if self.config.enable_confidence_head else ()
        return [*tokens, *confidence, *probs, *(logits if self.debug_outputs else ())]

    def joined(self, collected: Sequence[T], hidden: T) -> tuple[T, ...]:
        """Return the outputs in the order of the signature: the block's hidden rows come before its logits."""
        return (*collected[:-1], hidden, collected[-1]) if self.debug_outputs else tuple(collected)

    def context(self, taps: Tensor, start: Tensor, rings: list[Tensor]) -> list[Tensor]:
        """Return the rings (key and value of each layer in turn) with the projected taps written at positions start + i."""
        context, cos, sin = self.project_context(taps, start)
        updated: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            updated += layer.write_context(rings[2 * i], rings[2 * i + 1], context, start, cos, sin)
        return updated

    def forward(
        self,
        taps: Tensor,
        start: Tensor,
        total: Tensor,
        first: Tensor,
        anchor: Tensor,
        rings: list[Tensor],
        temperature: Tensor | None = None,
        uniform: Tensor | None = None,
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Run one draft step: write the new context rows, then draft a block behind `total` committed positions."""
        rings = self.context(taps, start, rings)
        x, cos, sin = self.embed_block(anchor, total)
        for i, layer in enumerate(self.layers):
            x = layer.draft(rings[2 * i], rings[2 * i + 1], x, total, first, cos, sin)
        return self.heads(x, anchor, temperature, uniform), rings
