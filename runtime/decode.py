"""Decoding: prefill prompts, then rounds of draft, choose, verify, accept, commit.

Knows numbers and token ids; logits, distributions and taps stay in the engine. A plain step is a round of width 1 without a draft, so
plain and speculative decoding choose tokens by one definition. B rows of the bound slot range, K proposals served a round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from dspark.runtime.accept import Acceptance, Chosen
from dspark.runtime.drafter import Drafter, Proposals
from dspark.runtime.engine import Array, Engine, Tensor
from dspark.runtime.errors import RequestError
from dspark.runtime.pending import PendingRows
from dspark.runtime.request import Choice, Request, room
from dspark.runtime.sampling import Draws
from dspark.runtime.schedule import Round, Scheduler
from dspark.runtime.state import Rows, Slots, View
from dspark.runtime.stop import ABORT
from dspark.runtime.target import Target, Verified


class Decoder:
    """Decodes requests on one target with one drafter; requests that are not speculative do without it."""

    def __init__(
        self, engine: Engine, slots: Slots, target: Target, drafter: Drafter, *, num_speculative_tokens: int, max_seq_len: int
    ) -> None:
        self._engine, self._slots, self._target, self._drafter = engine, slots, target, drafter
        self._k, self._max_seq_len = num_speculative_tokens, max_seq_len
        self._chunk = engine.manifest.limits.max_chunk
        self._accept = Acceptance(engine)
        self._scheduler = Scheduler(self._chunk)
        self._pending = PendingRows(slots, drafter)
        self._narrow: dict[tuple[View, int], Tensor] = {}
        self._greedy: dict[int, Draws] = {}
        # What a round writes into tensors: made once, since such tensors keep a copy.
        self._counts: dict[int, Array] = {}
        self._abandoned: list[Request] = []
        self.lock = threading.RLock()
        """To be held by whoever calls from several threads."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if its prompt leaves no room for a token."""
        self._limit(request)
        self._scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """End a request where it is; nothing happens if it has ended."""
        if request.finish_reason is None:
            request.finish_reason = ABORT
            self._end(request)

    def abandon(self, request: Request) -> None:
        """Cancel a request with the next step: this may be called at any time, by the garbage collector in the middle of one."""
        self._abandoned.append(request)

    def step(self) -> list[tuple[Request, list[int]]]:
        """Run one round, then feed prompts; return the tokens that requests emitted. Requests that end free their slots.

        An error ends the requests that it hit, as their `error`, and no others; an interruption ends them and goes on to the caller.
        """
        while self._abandoned:
            self.cancel(self._abandoned.pop())
        for request in self._scheduler.admit(self._slots.free):
            self._slots.admit(request.id)
        emitted: list[tuple[Request, list[int]]] = []
        plan = self._scheduler.round(self._k)
        if plan is not None:
            self._close_gap()
            began = time.perf_counter()
            with self._ending(plan.requests):
                emitted += zip(plan.requests, self.round(plan.requests, plan.width, plan.counts), strict=True)
            for request in plan.requests:
                request.stats.decode_seconds += time.perf_counter() - began
        for request, end in self._scheduler.prefills():
            with self._ending([request]):
                emitted.append((request, self.prefill(request, end)))
        return [(request, tokens) for request, tokens in emitted if tokens]

    def admit(self, request: Request) -> None:
        """Give the request a slot, for calls of `prefill` and `round`. Raises RequestError as `add` does, LimitError if none is free."""
        self._limit(request)
        self._slots.admit(request.id)

    def release(self, request: Request) -> None:
        """Free the request's slot; its next user sees nothing of it."""
        self._pending.forget(request.id)
        self._target.release(request.id)
        self._drafter.release(request.id)
        self._slots.release(request.id)

    def prefill(self, request: Request, end: int | None = None) -> list[int]:
        """Feed the prompt up to `end` (default: all), chunk by chunk, to target and drafter; return the first token once it is fed."""
        length = request.stats.prompt_tokens = len(request.prompt)
        end = length if end is None else end
        with self._timed([request], "prefill"):
            while request.fed < end:
                chunk = request.prompt[request.fed : min(end, request.fed + self._chunk)]
                verified = self._target.prefill(request.id, chunk)
                request.fed += len(chunk)
                rows = verified.taps.tensor.shape[1]
                if request.speculative and rows:
                    self._drafter.write_context(request.id, verified.taps, np.arange(request.fed - rows, request.fed))
            if request.fed < length:
                return []
            if request.speculative and self._drafter.total(request.id) < length:
                self._drafter.skip_to(request.id, length)
            plan, view = Round([request], 1, [0]), verified.logits.view
            (choice,) = self._choose(plan, verified, None, self._draws(plan, view))
        return request.emit(choice)

    def round(self, requests: Sequence[Request], width: int | None = None, counts: Sequence[int] | None = None) -> list[list[int]]:
        """Run one round for `requests` and return the tokens that each emitted.

        `width` is the number of rows to verify, 1..K+1 (1: a plain step, nothing is drafted), `counts` the proposals of each request that
        are judged, 0..width-1; without them each request judges as many as it may emit. Raises RequestError before anything is run.
        """
        with self._timed(requests, "choose"):
            plan = self._plan(requests, width, counts)
            ids, view, proposals = [r.id for r in requests], self._slots.view([r.id for r in requests]), None
            drafting = [r.id for r in requests if r.speculative and plan.width > 1]
            draws = self._draws(plan, view)
        with self._timed(requests, "draft"):
            self._pending.settle(drafting)
            if drafting:
                anchors, pending = [r.anchor for r in requests], self._pending.counts(ids)
                proposals = self._drafter.propose(ids, anchors, self._pending.taps, pending, draws=draws)
        with self._timed(requests, "verify"):
            tokens = self._verify_tokens(requests, view, plan.width, proposals)
            verified = self._target.verify(ids, Rows(view, tokens), plan.counts)
            self._pending.verified(verified.taps)
        with self._timed(requests, "accept"):
            choices = self._choose(plan, verified, proposals, draws)
        return [self._commit(*parts) for parts in zip(requests, plan.counts, choices, strict=True)]

    def _plan(self, requests: Sequence[Request], width: int | None, counts: Sequence[int] | None) -> Round:
        """Return the round as asked for, or as wide as the requests can use."""
        if not requests or not all(request.is_prefilled and request.finish_reason is None for request in requests):
            raise RequestError("a round is of at least one request, each with its prompt fed and not at its end")
        usual = Round.of(requests, self._k)
        most = usual.counts if width is None else [min(count, width - 1) for count in usual.counts]
        chosen = most if counts is None else list(counts)
        width = 1 + max(chosen) if width is None else width
        if not 1 <= width <= self._k + 1:
            raise RequestError(f"a round of width {width}, expected 1..{self._k + 1}")
        if len(chosen) != len(most) or not all(0 <= count <= limit for count, limit in zip(chosen, most, strict=True)):
            raise RequestError(f"counts {chosen} of a round of width {width}: these requests judge at most {list(most)}")
        return Round(requests, width, chosen)

    def _draws(self, plan: Round, view: View) -> Draws:
        """Return the numbers that choosing tokens needs, by row of the view."""
        if all(request.params.is_greedy for request in plan.requests):
            if view.size not in self._greedy:
                self._greedy[view.size] = Draws({}, view.size, self._engine.manifest.num_speculative_tokens)
            return self._greedy[view.size]
        rows = {row: request.sampled for request, row in zip(plan.requests, view.rows, strict=True)}
        return Draws(rows, view.size, self._engine.manifest.num_speculative_tokens)

    def _verify_tokens(self, requests: Sequence[Request], view: View, width: int, proposals: Proposals | None) -> Tensor:
        """Return the tokens `[B,width]` to verify: the drafter's own tensor where it has that width."""
        if proposals is not None and proposals.verify_tokens.shape[1] == width:
            return proposals.verify_tokens
        if (view, width) not in self._narrow:
            self._narrow[view, width] = self._engine.allocate((view.size, width), "int64")
        tokens = self._narrow[view, width]
        if proposals is not None:
            tokens.copy(proposals.verify_tokens)
        else:
            anchors = np.zeros((view.size, width), np.int64)
            anchors[list(view.rows), 0] = [request.anchor for request in requests]
            tokens.write(anchors)
        return tokens

    def _choose(self, plan: Round, verified: Verified, proposals: Proposals | None, draws: Draws) -> list[Choice]:
        """Return what follows each request's anchor: the accepted proposals and the next token."""
        view, tokens = verified.logits.view, None if proposals is None else proposals.verify_tokens
        if view.size not in self._counts:
            self._counts[view.size] = np.empty(view.size, np.int64)
        counts = self._counts[view.size]
        counts[:] = 0
        counts[list(view.rows)] = plan.counts
        logits = self._processed(plan, verified.logits, tokens)
        if draws.any:
            chosen = self._accept.sampled(logits, counts, draws, tokens, None if proposals is None else proposals.draft_probs)
        else:
            chosen = self._accept.greedy(logits, counts, tokens)
        rows = [(chosen.proposals[row, : chosen.accepted[row]], chosen.next_token[row]) for row in view.rows]
        emitted = [[*accepted.tolist(), int(token)] for accepted, token in rows]
        logprobs = self._logprobs(plan, verified.logits, chosen, emitted)
        return [Choice(*parts) for parts in zip(emitted, logprobs, strict=True)]

    def _processed(self, plan: Round, logits: Rows, verify_tokens: Tensor | None) -> Rows:
        """Return the logits as the requests' parameters change them; this path goes through the host."""
        active = [
            (request.processor, request, row, count)
            for request, row, count in zip(plan.requests, logits.view.rows, plan.counts, strict=True)
            if request.processor is not None and request.processor.active(len(request.output))
        ]
        if not active:
            return logits
        values = logits.tensor.read().copy()
        drafted: Array = np.zeros((len(values), 1), np.int64) if verify_tokens is None else verify_tokens.read()
        for processor, request, row, count in active:
            processor.apply(values[row, : count + 1], request.output, drafted[row, 1 : 1 + count].tolist())
        return self._accept.adjusted(logits, values)

    def _logprobs(self, plan: Round, logits: Rows, chosen: Chosen, emitted: Sequence[list[int]]) -> list[list[dict[int, float]]]:
        """Return the log-probabilities of each request's tokens, the chosen one first, where asked for."""
        asked = [request.params.logprobs for request in plan.requests]
        if all(n is None for n in asked):
            return [[] for _ in asked]
        own, top, top_tokens = self._accept.logprobs(logits, chosen)
        return [
            []
            if n is None
            else [
                {token: float(own[row, i])} | dict(zip(top_tokens[row, i, :n].tolist(), top[row, i, :n].tolist(), strict=True))
                for i, token in enumerate(tokens)
            ]
            for n, row, tokens in zip(asked, logits.view.rows, emitted, strict=True)
        ]

    def _commit(self, request: Request, count: int, choice: Choice) -> list[int]:
        """Commit the anchor and the accepted proposals; emit these proposals and the next token."""
        rows = len(choice.tokens)
        self._target.commit(request.id, rows)
        kept = request.emit(choice)
        if request.speculative and request.finish_reason is None:
            self._pending.committed(request.id, rows, request.position)
        request.stats.accepted_per_round.append(len(kept))
        request.stats.accepted.append(rows - 1)
        request.stats.proposed.append(count)
        return kept

    def _close_gap(self) -> None:
        """Move the request in the highest slot down where that makes the slot ranges of calls smaller."""
        straggler = self._slots.straggler()
        if straggler is not None:
            self._pending.keep(straggler)
            self._slots.move_down(straggler)

    def _limit(self, request: Request) -> None:
        most = room(len(request.prompt), self._max_seq_len)
        request.rule = replace(request.rule, max_tokens=min(request.rule.max_tokens, most))

    @contextmanager
    def _ending(self, requests: Sequence[Request]) -> Iterator[None]:
        """End those of the requests that have come to their end; all of them if an error left them half way."""
        try:
            yield
        except BaseException as error:  # a target of the user's own may raise anything
            for request in requests:
                request.finish_reason = request.finish_reason or ABORT
                request.error = request.error or error
            if not isinstance(error, Exception):
                raise
        finally:
            for request in requests:
                if request.finish_reason is not None:
                    self._end(request)

    def _end(self, request: Request) -> None:
        holds_slot = request in self._scheduler.running
        self._scheduler.remove(request)
        if holds_slot:
            self.release(request)

    @contextmanager
    def _timed(self, requests: Sequence[Request], phase: str) -> Iterator[None]:
        """Add the time of the block, and the engine's part of it, to a phase of every request that took part."""
        began, engine = time.perf_counter(), self._engine.run_seconds
        yield
        seconds, engine = time.perf_counter() - began, self._engine.run_seconds - engine
        for request in requests:
            request.stats.seconds[phase] += seconds
            request.stats.engine[phase] += engine
