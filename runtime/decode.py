"""Decoding: prefill a prompt, then rounds of draft, choose, verify, accept, commit.

Knows numbers and token ids; logits and taps stay in the engine. Does not know text. A plain step is a round of width 1 without a draft,
so plain and speculative decoding choose tokens by one definition. B rows of the bound slot range, K proposals served a round.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from dspark.runtime.drafter import Drafter, Proposals
from dspark.runtime.engine import Array, Engine, Tensor
from dspark.runtime.errors import RequestError
from dspark.runtime.sampling import Accept
from dspark.runtime.state import Rows, Slots, View
from dspark.runtime.stats import Stats
from dspark.runtime.stop import StopRule
from dspark.runtime.target import Target, Verified


@dataclass
class Request:
    """A request being decoded."""

    id: Hashable
    prompt: Sequence[int]
    rule: StopRule
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    committed: int | None = None
    """Rows of the last verification that were committed and that the drafter has not got yet; None when it has all."""
    stats: Stats = field(default_factory=Stats)

    @property
    def anchor(self) -> int:
        """The newest token: chosen, not yet seen by the target."""
        return self.output[-1]

    @property
    def position(self) -> int:
        """The anchor's position: the number of tokens the target has committed."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return self.rule.max_tokens - len(self.output)

    def emit(self, tokens: Sequence[int]) -> list[int]:
        """Append newly committed tokens, up to the request's end, and return those that were kept."""
        kept, self.finish_reason = self.rule.cut(len(self.output), tokens)
        self.output += kept
        self.stats.tokens = len(self.output)
        return kept


class Decoder:
    """Decodes requests on one target, with a drafter or plainly (None)."""

    def __init__(
        self,
        engine: Engine,
        slots: Slots,
        target: Target,
        drafter: Drafter | None,
        *,
        num_speculative_tokens: int,
        max_seq_len: int,
    ) -> None:
        self._engine, self._slots, self._target, self._drafter = engine, slots, target, drafter
        self._k, self._max_seq_len = num_speculative_tokens, max_seq_len
        self._chunk = engine.manifest.limits.max_chunk
        self._accept = Accept(engine)
        self._verified: Verified | None = None
        self._pending: dict[Hashable, Request] = {}
        self._narrow: dict[tuple[View, int], Tensor] = {}

    def decode(self, request: Request) -> Iterator[list[int]]:
        """Decode one request to its end and yield its tokens as they are committed; frees its slot in any case."""
        self.admit(request)
        try:
            yield self.prefill(request)
            while request.finish_reason is None:
                began, engine = time.perf_counter(), self._engine.run_seconds
                (tokens,) = self.round([request])
                request.stats.decode_seconds += time.perf_counter() - began
                request.stats.engine_seconds += self._engine.run_seconds - engine
                yield tokens
        finally:
            self.release(request)

    def admit(self, request: Request) -> None:
        """Give the request a slot. Raises RequestError if its prompt leaves no room for a token."""
        room = self._max_seq_len - len(request.prompt)
        if not request.prompt or room < 1:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens, max_seq_len is {self._max_seq_len} with at least one for the output"
            )
        request.rule = replace(request.rule, max_tokens=min(request.rule.max_tokens, room))
        self._slots.admit(request.id)

    def release(self, request: Request) -> None:
        """Free the request's slot; its next user sees nothing of it."""
        self._pending.pop(request.id, None)
        self._target.release(request.id)
        if self._drafter is not None:
            self._drafter.release(request.id)
        self._slots.release(request.id)

    def prefill(self, request: Request) -> list[int]:
        """Feed the prompt chunk by chunk to target and drafter; return the first token."""
        request.stats.prompt_tokens = len(request.prompt)
        with _timed([request], "prefill"):
            for begin in range(0, len(request.prompt), self._chunk):
                chunk = request.prompt[begin : begin + self._chunk]
                verified = self._target.prefill(request.id, chunk)
                if self._drafter is not None:
                    self._drafter.write_context(request.id, verified.taps.tensor.read()[0], np.arange(begin, begin + len(chunk)))
            _, token = self._accept(verified.logits, np.zeros(1, np.int64))
        return request.emit([int(token[0])])

    def round(self, requests: Sequence[Request]) -> list[list[int]]:
        """Run one round for all `requests` and return the tokens that each emitted."""
        ids, width, proposals = [r.id for r in requests], self._width(requests), None
        self._settle(ids if width > 1 else [])
        if self._drafter is not None and width > 1:
            with _timed(requests, "draft"):
                taps = self._verified.taps if self._verified is not None else None
                proposals = self._drafter.propose(ids, [r.anchor for r in requests], taps, [r.committed for r in requests])
        view = self._slots.view(ids) if proposals is None else proposals.view
        counts = np.zeros(view.size, np.int64)
        for request, row in zip(requests, view.rows, strict=True):
            counts[row] = min(width - 1, request.left - 1)
        with _timed(requests, "verify"):
            tokens = self._verify_tokens(requests, view, width, proposals)
            self._verified = self._target.verify(ids, Rows(view, tokens))
        with _timed(requests, "accept"):
            drafted = None if proposals is None else proposals.verify_tokens
            accepted, following = self._accept(self._verified.logits, counts, drafted)
        return [
            self._commit(request, proposals, row, int(counts[row]), int(accepted[row]), int(following[row]))
            for request, row in zip(requests, view.rows, strict=True)
        ]

    def _settle(self, drafting: Sequence[Hashable]) -> None:
        """Write the rows of requests that do not draft in this round: the next verification takes the place of their taps."""
        for request in [r for r in self._pending.values() if r.id not in drafting]:
            assert self._verified is not None and self._drafter is not None and request.committed is not None
            row = self._slots.slot(request.id) - self._verified.taps.view.lo
            taps = self._verified.taps.tensor.read()[row, : request.committed]
            self._drafter.write_context(request.id, taps, np.arange(request.position - request.committed, request.position))
            request.committed = None
            del self._pending[request.id]

    def _width(self, requests: Sequence[Request]) -> int:
        """Rows to verify: the anchor and K proposals; fewer where a sequence would outgrow the limit, one where no draft can count."""
        if self._drafter is None or all(request.left == 1 for request in requests):
            return 1
        return min(self._k + 1, self._max_seq_len - max(request.position for request in requests))

    def _verify_tokens(self, requests: Sequence[Request], view: View, width: int, proposals: Proposals | None) -> Tensor:
        """Return the tokens `[B,width]` to verify: the drafter's own tensor where it has that width."""
        if proposals is not None and proposals.verify_tokens.shape[1] == width:
            return proposals.verify_tokens
        if (view, width) not in self._narrow:
            self._narrow[view, width] = self._engine.allocate((view.size, width), "int64")
        tokens = self._narrow[view, width]
        if proposals is not None:
            tokens.write(proposals.verify_tokens.read()[:, :width])
        else:
            anchors = np.zeros((view.size, 1), np.int64)
            anchors[list(view.rows), 0] = [request.anchor for request in requests]
            tokens.write(anchors)
        return tokens

    def _commit(self, request: Request, proposals: Proposals | None, row: int, count: int, accepted: int, following: int) -> list[int]:
        """Commit the anchor and the accepted proposals; emit these proposals and the next token."""
        drafted: Array = np.zeros(0, np.int64) if proposals is None else proposals.verify_tokens.read()[row, 1 : 1 + accepted]
        self._target.commit(request.id, accepted + 1)
        kept = request.emit([*drafted.tolist(), following])
        self._pending.pop(request.id, None)
        if self._drafter is not None and request.finish_reason is None:
            request.committed = accepted + 1
            self._pending[request.id] = request
        request.stats.accepted_per_round.append(len(kept))
        request.stats.accepted.append(accepted)
        request.stats.proposed.append(count)
        return kept


@contextmanager
def _timed(requests: Sequence[Request], phase: str) -> Iterator[None]:
    """Add the time of the block to a phase of every request that took part."""
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    for request in requests:
        request.stats.seconds[phase] += seconds
