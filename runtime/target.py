"""The target: the protocol that decoding needs of it, and the built-in one that runs the exported Qwen3 graph.

Per request the built-in target keeps one number, the committed length; rollback is that number, nothing is copied.
B rows of the bound slot range, N new rows, M logit rows, V vocabulary rows, m tapped layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dspark.runtime.engine import Array, Engine, Tensor
from dspark.runtime.errors import LimitError, RequestError
from dspark.runtime.graphs import MODEL_DTYPE, TARGET
from dspark.runtime.state import BoundStep, Rows, Slots, State, View


@dataclass(frozen=True)
class Verified:
    """What the target gave for the rows of a view; valid until its next call with the same batch."""

    logits: Rows
    """`[B,M,V]` float32; row i judges what follows token i."""
    taps: Rows
    """`[B,N,m*H]`: outputs of the tapped layers for the fed tokens. A prefill may give fewer, those of the newest tokens."""


class Target(Protocol):
    """What decoding needs of a target; `Qwen3Target` is one, `examples/hf_target.py` another.

    A target keeps the committed tokens of each request. Its tensors are made by the engine's `allocate`, a row for each slot of the call's
    view (`Slots.view`), which says where the requests are and is new in every call; the same tensors for equal views spare the graphs
    that read them a new binding.
    """

    def prefill(self, request: Hashable, tokens: Sequence[int]) -> Verified:
        """Feed the next chunk of a prompt and commit it; the view is the request's slot alone, logits are those of the last row (M = 1).

        A target that finds tokens in a prefix cache computes no taps for them: it returns the taps of the rows it computed, at
        least the last, and the drafter does without the others.
        """
        ...

    def verify(self, requests: Sequence[Hashable], tokens: Rows, counts: Sequence[int]) -> Verified:
        """Feed `tokens [B,N]` behind each request's committed length, without committing them; M = N.

        The view is that of `requests`. Of a request's N rows the first `count` + 1 mean something; what comes out of the others, and of
        slots of no request, is never read. What a verification fed and no `commit` followed is forgotten by the next one.
        """
        ...

    def commit(self, request: Hashable, rows: int) -> None:
        """Commit the first `rows` tokens of the last verification, 1 to `count` + 1; the others are forgotten."""
        ...

    def release(self, request: Hashable) -> None:
        """Forget a request, also one that was never fed."""
        ...


class Qwen3Target:
    """The exported target with a key/value cache per slot."""

    def __init__(self, engine: Engine, slots: Slots, max_seq_len: int | None = None) -> None:
        self._engine, self._slots, self._manifest = engine, slots, engine.manifest
        self.max_seq_len = self._manifest.limits.seq_len(max_seq_len)
        self.caches = State(engine, "cache", self._manifest.target, slots.count, self._manifest.cache_capacity)
        self._length = np.zeros(slots.count, np.int64)
        self._fed = np.zeros(slots.count, np.int64)
        slots.on_admission(self.caches.clear)
        slots.on_admission(self._clear)
        slots.on_move(self._move)
        # As in the drafter: one set of outputs a view and width, whatever tokens a step is bound to.
        self._outputs: dict[tuple[View, int], dict[str, Tensor]] = {}
        self._logits: dict[tuple[View, int], Tensor] = {}
        self._steps: dict[tuple[View, int, int], BoundStep] = {}
        self._prefills: dict[tuple[View, int], BoundStep] = {}

    def length(self, request: Hashable) -> int:
        """Return the number of committed tokens of `request`."""
        return int(self._length[self._slots.slot(request)])

    def release(self, request: Hashable) -> None:
        """Forget the rows of `request`; its slot's next user sees none of them."""
        self._clear(self._slots.slot(request))

    def _clear(self, slot: int) -> None:
        self._length[slot] = self._fed[slot] = 0

    def _move(self, old: int, new: int) -> None:
        self.caches.move(old, new)
        self._length[new] = self._length[old]
        self._clear(old)

    def prefill(self, request: Hashable, tokens: Sequence[int]) -> Verified:
        """Feed at most `max_chunk` tokens behind the committed length and commit them."""
        slot, n = self._slots.slot(request), len(tokens)
        if not 1 <= n <= self._manifest.limits.max_chunk:
            raise LimitError(f"a chunk of {n} tokens, the bundle allows 1..{self._manifest.limits.max_chunk}")
        outside = [token for token in tokens if not 0 <= token < self._manifest.target.vocab_size]
        if outside:
            raise RequestError(f"token ids {outside[:5]} are outside the vocabulary's 0..{self._manifest.target.vocab_size - 1}")
        if self._length[slot] + n > self.max_seq_len:
            raise LimitError(f"{self._length[slot] + n} tokens, max_seq_len is {self.max_seq_len}")
        view = View(slot, 1, (0,))
        step = self._prefills.get((view, n))
        if step is None:
            tokens_tensor = self._engine.allocate((1, n), "int64")
            step = self._bind(view, tokens_tensor, np.array([[n - 1]]), self._allocate_outputs(view, n, 1))
            self._prefills = {(view, n): step}  # chunks have many lengths: keep the last
        step.tensors["tokens"].write(np.asarray(tokens, np.int64)[None])
        verified = self._run(step, view, n)
        self._length[slot] += n
        self._fed[slot] = 0
        return verified

    def verify(self, requests: Sequence[Hashable], tokens: Rows, counts: Sequence[int]) -> Verified:
        """Feed `tokens [B,N]`, N at most K + 1, behind each request's committed length; `counts` of the proposals mean something."""
        view, n = self._slots.view(requests), tokens.tensor.shape[1]
        proposals = self._manifest.num_speculative_tokens
        if n > proposals + 1:
            raise LimitError(
                f"{n} rows to verify: this bundle serves {proposals} proposals a round, so at most {proposals + 1} rows (the anchor and "
                f"the proposals) of a block of {self._manifest.drafter.block_size}"
            )
        if tokens.view != view:
            raise RequestError(f"tokens of slots {tokens.view}, the requests hold {view}")
        if len(counts) != len(requests) or not all(0 <= count < n for count in counts):
            raise RequestError(f"counts {list(counts)} for {len(requests)} requests and {n} rows: expected one of 0..{n - 1} for each")
        longest = max(self.length(request) + count + 1 for request, count in zip(requests, counts, strict=True))
        if longest > self.max_seq_len:
            raise LimitError(f"{longest} tokens, max_seq_len is {self.max_seq_len}: verify fewer rows")
        key = view, n, id(tokens.tensor)
        if key not in self._steps:
            if (view, n) not in self._outputs:
                self._outputs[view, n] = self._allocate_outputs(view, n, n)
            every_row = np.tile(np.arange(n), (view.size, 1))
            self._steps[key] = self._bind(view, tokens.tensor, every_row, self._outputs[view, n])
        verified = self._run(self._steps[key], view, n)
        for request, count in zip(requests, counts, strict=True):
            self._fed[self._slots.slot(request)] = count + 1
        return verified

    def commit(self, request: Hashable, rows: int) -> None:
        """Commit the first `rows` tokens of the request's last verification. Raises RequestError unless they are 1 to its width."""
        slot = self._slots.slot(request)
        if not 1 <= rows <= self._fed[slot]:
            raise RequestError(f"request {request!r} commits {rows} rows, expected 1..{self._fed[slot]} of its last verification")
        self._length[slot] += rows
        self._fed[slot] = 0

    def _allocate_outputs(self, view: View, n: int, logit_rows: int) -> dict[str, Tensor]:
        config = self._manifest.drafter
        if (view, logit_rows) not in self._logits:
            self._logits[view, logit_rows] = self._engine.allocate((view.size, logit_rows, config.vocab_size), "float32")
        taps = self._engine.allocate((view.size, n, config.taps_width), MODEL_DTYPE)
        return {"logits": self._logits[view, logit_rows], "taps": taps}

    def _bind(self, view: View, tokens: Tensor, logit_rows: Array, outputs: Mapping[str, Tensor]) -> BoundStep:
        start, rows = self._engine.allocate((view.size,), "int64"), self._engine.allocate(logit_rows.shape, "int64")
        rows.write(logit_rows)
        tensors = {"tokens": tokens, "start": start, "logit_rows": rows, **outputs}
        return BoundStep(self._engine, TARGET, self.caches, view, tensors)

    def _run(self, step: BoundStep, view: View, n: int) -> Verified:
        # Rows of other requests write junk behind their own end, where their next rows go.
        start = self._length[view.lo : view.lo + view.size]
        self.caches.reserve(view.lo + view.size, int(start.max()) + n)
        step.tensors["start"].write(start)
        step.run()
        return Verified(Rows(view, step.tensors["logits"]), Rows(view, step.tensors["taps"]))
