"""The drafter of a bundle, driven by requests and absolute positions: write context rows, propose a block.

Per request it keeps numbers only: `total` (positions whose context rows are complete, the next anchor's position) and `first` (the
first seeded position; rows before it were never seen and stay invisible). Knows slots and rings; not the target, not sampling.
B rows of the bound slot range, N new rows, K proposals, m tapped layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dspark.runtime.engine import Array, Engine, Tensor
from dspark.runtime.errors import LimitError, RequestError
from dspark.runtime.graphs import CONTEXT, DRAFT, DRAFT_SAMPLED, MODEL_DTYPE, TensorSpec
from dspark.runtime.sampling import Draws
from dspark.runtime.state import MOST_BINDINGS, BoundStep, Rows, Slots, State, View


@dataclass(frozen=True)
class Proposals:
    """What a draft gave, for the rows of `view`; valid until the next call with the same batch."""

    view: View
    verify_tokens: Tensor
    """`[B,K+1]`: the anchor, then the proposals."""
    confidence_logits: Tensor | None
    """`[B,K]`: logit that a proposal is accepted given that all before it were."""
    draft_probs: Tensor | None
    """`[B,K,V]`: the distributions that the proposals were drawn from; None for greedy ones."""
    debug: dict[str, Tensor]

    def tokens(self) -> Array:
        """Return the proposals of each request, `[requests, K]`."""
        return self.verify_tokens.read()[list(self.view.rows), 1:]


class Drafter:
    """Context rings and draft steps for the requests in `slots`."""

    def __init__(self, engine: Engine, slots: Slots) -> None:
        self._engine, self._slots, self._manifest = engine, slots, engine.manifest
        self.rings = State(engine, "ring", self._manifest.drafter, slots.count, self._manifest.ring_capacity)
        self._total = np.zeros(slots.count, np.int64)
        self._first = np.zeros(slots.count, np.int64)
        slots.on_admission(self.rings.clear)
        slots.on_admission(self._clear)
        slots.on_move(self._move)
        # Outputs are one set a view, whatever taps a step is bound to: the target binds them in turn, so fresh ones would call for
        # fresh bindings on both sides in every round.
        self._outputs: dict[View, dict[str, Tensor]] = {}
        self._drafts: dict[tuple[str, View, int, int], BoundStep] = {}
        self._numbers: dict[int, Array] = {}
        self._contexts: dict[tuple[View, int, int], BoundStep] = {}

    def total(self, request: Hashable) -> int:
        """Return the number of positions written for `request`: its next anchor's position."""
        return int(self._total[self._slots.slot(request)])

    def release(self, request: Hashable) -> None:
        """Forget the rows of `request`; its slot's next user sees none of them."""
        self._clear(self._slots.slot(request))

    def _clear(self, slot: int) -> None:
        self._total[slot] = self._first[slot] = 0

    def _move(self, old: int, new: int) -> None:
        self.rings.move(old, new)
        self._total[new], self._first[new] = self._total[old], self._first[old]
        self._clear(old)

    def skip_to(self, request: Hashable, position: int) -> None:
        """Take the positions below `position` as never seen: nothing of them is visible, and the next row belongs at `position`.

        Raises RequestError if rows behind it are written.
        """
        slot = self._slots.slot(request)
        if not self._total[slot] <= position < self._manifest.limits.max_seq_len:
            raise RequestError(
                f"request {request!r} has rows up to position {self._total[slot]}: it can skip to a position from there to "
                f"{self._manifest.limits.max_seq_len - 1}, not to {position}"
            )
        self._total[slot] = self._first[slot] = position

    def write_context(self, request: Hashable, taps: Rows | ArrayLike, positions: ArrayLike) -> None:
        """Write the context rows of consecutive absolute positions, as after a prefill chunk.

        `taps [M,m*H]`, or `[1,M,m*H]` as a prefill gave them; `positions [M]`. Positions may begin beyond `total`: what lies between was
        never seen and stays invisible. Only the newest rows that a window can show are written. Raises RequestError before any write.
        """
        slot = self._slots.slot(request)
        given = taps.tensor if isinstance(taps, Rows) else np.asarray(taps)[None]
        where = self._checked_positions(given.shape, np.asarray(positions)[None])
        start, stop = int(where[0, 0]), int(where[0, -1]) + 1
        self._check_range(slot, start, stop)
        begins = start > self._total[slot] or self._total[slot] == 0
        written = max(start, stop - self._manifest.window)
        chunk, view = min(self._manifest.limits.max_chunk, self._manifest.ring_capacity), View(slot, 1, (0,))
        if isinstance(taps, Rows) and written == start and stop - start <= chunk:
            self._write(view, taps.tensor, np.array([start]))  # they stay in the engine
        else:
            rows = given if isinstance(given, np.ndarray) else given.read()
            for begin in range(written, stop, chunk):
                end = min(begin + chunk, stop)
                self._write(view, rows[:, begin - start : end - start], np.array([begin]))
        self._first[slot] = start if begins else self._first[slot]
        self._total[slot] = stop

    def write_context_batched(
        self, requests: Sequence[Hashable], taps: ArrayLike, positions: ArrayLike, mask: ArrayLike | None = None
    ) -> None:
        """Write context rows of several requests: the first rows of each whose `mask` is set.

        `taps [requests,M,m*H]`, `positions [requests,M]` consecutive where valid, `mask [requests,M]` true then false in each row;
        masked entries may hold anything and leave the visible rows unchanged. Raises RequestError before any write.
        """
        view = self._slots.view(requests)
        where, counts = _unmasked(np.asarray(positions), mask, len(requests))
        rows = np.asarray(taps)
        where = self._checked_positions(rows.shape, where)
        slots = [self._slots.slot(request) for request in requests]
        for slot, begin, count in zip(slots, where[:, 0], counts, strict=True):
            if count:
                self._check_range(slot, int(begin), int(begin + count))
        if rows.shape[1] > self._manifest.num_speculative_tokens + 1:
            # More junk than the rings have room for: row by row, exactly.
            for request, own, place, count in zip(requests, rows, where, counts, strict=True):
                if count:
                    self.write_context(request, own[:count], place[:count])
            return
        starts = self._total[view.lo : view.lo + view.size].copy()
        batch = np.zeros((view.size, *rows.shape[1:]), rows.dtype)
        for row, slot, own, begin, count in zip(view.rows, slots, rows, where[:, 0], counts, strict=True):
            if count:
                starts[row], batch[row, :count] = begin, own[:count]
                if begin > self._total[slot] or self._total[slot] == 0:
                    self._first[slot] = begin
        self._write(view, batch, starts)
        for slot, begin, count in zip(slots, where[:, 0], counts, strict=True):
            if count:
                self._total[slot] = begin + count

    def propose(
        self,
        requests: Sequence[Hashable],
        anchors: Sequence[int],
        taps: Rows | ArrayLike | None = None,
        counts: Sequence[int | None] | None = None,
        positions: Sequence[int] | None = None,
        draws: Draws | None = None,
    ) -> Proposals:
        """Write each request's newly committed rows, then draft a block behind its anchor: greedily, or drawn where `draws` says.

        `taps` are those of the last verification `[B,N,m*H]`, or an array `[requests,N,m*H]`; `counts` says how many of its rows each
        request committed (1..N, the bonus included), None for a request without new rows, as right after its prefill. `positions`, if
        given, are the anchors' positions, checked. Raises RequestError before any write.
        """
        view = self._slots.view(requests)
        k = self._manifest.num_speculative_tokens
        counts = [None] * len(requests) if counts is None else list(counts)
        if taps is not None and not isinstance(taps, Rows):
            taps = np.asarray(taps)
        self._check_propose(requests, anchors, taps, counts, positions)
        n = 1 if taps is None else _shape(taps)[1]
        slots = slice(view.lo, view.lo + view.size)
        self.rings.reserve(view.lo + view.size, int(self._total[slots].max()) + max(n, k + 1))
        sampled = draws if draws is not None and draws.any else None
        graph = DRAFT if sampled is None else DRAFT_SAMPLED
        draft = self._draft(graph, view, n, taps.tensor if isinstance(taps, Rows) and taps.view == view else None)
        if taps is not None and not (isinstance(taps, Rows) and taps.view == view):
            draft.tensors["taps"].write(self._taps_by_slot(view, taps, counts))
        if view.size not in self._numbers:
            self._numbers[view.size] = np.empty((3, view.size), np.int64)
        start, total, anchor = self._numbers[view.size]
        start[:], total[:], anchor[:] = self._total[slots], self._total[slots], 0
        for row, token, count in zip(view.rows, anchors, counts, strict=True):
            anchor[row], total[row] = token, start[row] + (count or 0)
        for name, values in (("start", start), ("total", total), ("first", self._first[slots]), ("anchor", anchor)):
            draft.tensors[name].write(values)
        if sampled is not None:
            for name, values in sampled.of(("temperature", "draft_uniform")).items():
                draft.tensors[name].write(values)
        draft.run()
        self._total[slots] = total
        debug: dict[str, Tensor] = {n: draft.tensors[n] for n in ("block_hidden", "draft_logits") if n in draft.tensors}
        named = draft.tensors
        return Proposals(view, named["verify_tokens"], named.get("confidence_logits"), named.get("draft_probs"), debug)

    def _check_propose(
        self,
        requests: Sequence[Hashable],
        anchors: Sequence[int],
        taps: Rows | Array | None,
        counts: Sequence[int | None],
        positions: Sequence[int] | None,
    ) -> None:
        config, most = self._manifest.drafter, self._manifest.num_speculative_tokens + 1
        if not len(anchors) == len(counts) == len(requests):
            raise RequestError(f"{len(requests)} requests, {len(anchors)} anchors and {len(counts)} counts: expected one each")
        if not all(_is_index(token, config.vocab_size) for token in anchors):
            raise RequestError(f"anchors {list(anchors)}: expected token ids in 0..{config.vocab_size - 1}")
        shape = (0, 0, config.taps_width) if taps is None else _shape(taps)
        rows = shape[1] if len(shape) == 3 else 0
        if taps is not None and (len(shape) != 3 or shape[2] != config.taps_width or not 1 <= rows <= most):
            raise RequestError(f"taps have shape {list(shape)}, expected [requests, 1..{most}, {config.taps_width}]")
        if isinstance(taps, np.ndarray) and shape[0] != len(requests):
            raise RequestError(f"taps of {shape[0]} rows for {len(requests)} requests")
        for request, count in zip(requests, counts, strict=True):
            if count is None:
                continue
            if taps is None:
                raise RequestError(f"request {request!r} committed {count} rows, but no taps are given")
            if not _is_index(count, rows + 1) or count == 0:
                raise RequestError(f"request {request!r} committed {count} rows, expected 1..{rows} (the bonus included)")
            slot = self._slots.slot(request)
            self._check_range(slot, int(self._total[slot]), int(self._total[slot]) + count)
            if isinstance(taps, Rows) and not taps.view.lo <= slot < taps.view.lo + taps.view.size:
                raise RequestError(f"request {request!r} holds slot {slot}, the taps are of slots {taps.view}")
        for request, count, position in zip(requests, counts, () if positions is None else positions, strict=positions is not None):
            if position != self.total(request) + (count or 0):
                raise RequestError(
                    f"the anchor of request {request!r} is at position {position}, but its context ends at "
                    f"{self.total(request) + (count or 0)}: write the rows between first"
                )

    def _checked_positions(self, shape: tuple[int, ...], positions: Array) -> Array:
        width = self._manifest.drafter.taps_width
        if len(shape) != 3 or shape[2] != width or shape[:2] != positions.shape or shape[1] < 1:
            raise RequestError(f"taps {list(shape)} and positions {list(positions.shape)}: expected [.., M, {width}] and [.., M]")
        if positions.dtype.kind not in "iu" or (np.diff(positions, axis=1) != 1).any() or (positions < 0).any():
            raise RequestError(f"positions {positions.tolist()}: expected consecutive absolute positions from 0")
        return positions.astype(np.int64)

    def _check_range(self, slot: int, start: int, stop: int) -> None:
        if start < self._total[slot]:
            raise RequestError(f"positions begin at {start}, but rows up to {self._total[slot] - 1} are written: continue there")
        if stop > self._manifest.limits.max_seq_len:
            raise LimitError(f"positions end at {stop - 1}, the bundle allows sequences of {self._manifest.limits.max_seq_len} tokens")

    def _write(self, view: View, taps: Array | Tensor, starts: Array) -> None:
        """Run `context` on taps of the engine, or of the host."""
        n, shared = taps.shape[1], None if isinstance(taps, np.ndarray) else taps
        self.rings.reserve(view.lo + view.size, int(starts.max()) + n)
        key = view, n, id(shared)
        context = self._contexts.get(key)
        if context is None:
            own = self._engine.allocate((view.size, n, self._manifest.drafter.taps_width), MODEL_DTYPE) if shared is None else shared
            start = self._engine.allocate((view.size,), "int64")
            context = BoundStep(self._engine, CONTEXT, self.rings, view, {"taps": own, "start": start})
            self._contexts = {key: context}  # prefill chunks have many lengths: keep the last
        if isinstance(taps, np.ndarray):
            context.tensors["taps"].write(taps)
        context.tensors["start"].write(starts)
        context.run()

    def _draft(self, graph: str, view: View, n: int, taps: Tensor | None) -> BoundStep:
        """Return the step of a slot range for n new rows, bound to `taps` if given, else to a tensor of its own."""
        key = graph, view, n, id(taps)
        if key not in self._drafts:
            if len(self._drafts) >= MOST_BINDINGS:  # a target that makes new taps each time
                self._drafts.clear()
            outputs = self._draft_outputs(graph, view)
            tensors = {"taps": taps, **outputs} if taps is not None else outputs
            for spec in self._engine.signatures[graph].inputs:
                if spec.name not in tensors and "R" not in spec.shape:
                    tensors[spec.name] = self._allocate(spec, view, n)
            self._drafts[key] = BoundStep(self._engine, graph, self.rings, view, tensors)
        return self._drafts[key]

    def _draft_outputs(self, graph: str, view: View) -> dict[str, Tensor]:
        """Return the outputs of a slot range; both draft graphs share those of one name."""
        signature, known = self._engine.signatures[graph], self._outputs.setdefault(view, {})
        specs = [spec for spec in signature.outputs if spec.name not in signature.aliases]
        for spec in specs:
            if spec.name not in known:
                known[spec.name] = self._allocate(spec, view)
        return {spec.name: known[spec.name] for spec in specs}

    def _allocate(self, spec: TensorSpec, view: View, n: int = 0) -> Tensor:
        sizes = {"B": view.size, "N": n}
        return self._engine.allocate(tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape), spec.dtype)

    def _taps_by_slot(self, view: View, taps: Rows | Array, counts: Sequence[int | None]) -> Array:
        """Return taps of another slot range, or of requests in order, as rows of `view`."""
        values = taps.tensor.read() if isinstance(taps, Rows) else taps
        batch = np.zeros((view.size, *values.shape[1:]), values.dtype)
        for i, (row, count) in enumerate(zip(view.rows, counts, strict=True)):
            if count is not None:
                source = view.lo + row - taps.view.lo if isinstance(taps, Rows) else i
                batch[row, :count] = values[source, :count]
        return batch


def _unmasked(positions: Array, mask: ArrayLike | None, requests: int) -> tuple[Array, Array]:
    """Return positions that go on where entries are masked, and the valid ones of each request."""
    valid = np.ones(positions.shape, bool) if mask is None else np.asarray(mask, bool)
    if positions.ndim != 2 or not positions.shape[1] or len(positions) != requests:
        raise RequestError(f"positions have shape {list(positions.shape)}, expected [{requests}, M] with M of at least 1")
    if valid.shape != positions.shape or (valid[:, 1:] & ~valid[:, :-1]).any():
        raise RequestError(f"mask {valid.tolist()}: expected the shape of positions, and no valid row behind a masked one")
    counts = valid.sum(1)
    begins = np.where(counts > 0, positions[:, 0], 0)
    return np.where(valid, positions, begins[:, None] + np.arange(positions.shape[1])), counts


def _is_index(value: Any, size: int) -> bool:
    return isinstance(value, (int, np.integer)) and 0 <= int(value) < size


def _shape(taps: Rows | Array) -> tuple[int, ...]:
    return taps.tensor.shape if isinstance(taps, Rows) else taps.shape
