"""Slots and the state tensors that hold one row per slot: rings and key/value caches.

A request holds a slot. Every call of an engine binds a contiguous range of slots, as input and output alike. Tensors start small and
grow with the slots in use and, in steps, with their rows, since CPU kernels work over all of the capacity; compiled engines want all of it
from the start. Knows numbers and tensors; not what the rows mean.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

from dspark.runtime.config import TransformerConfig
from dspark.runtime.engine import Engine, Step, Tensor
from dspark.runtime.errors import EngineError, LimitError, RequestError, UnknownRequestError
from dspark.runtime.graphs import MODEL_DTYPE, round_up_16, state_names

logger = logging.getLogger(__name__)

GROWTH = 64
"""Rows added when a state tensor is too small."""
MOST_BINDINGS = 64
"""Bindings that are kept to tensors of others, which may be new in every call."""


@dataclass(frozen=True)
class View:
    """The slot range lo..lo+size-1 of one call, and the row of each request in it. Views of one range are equal."""

    lo: int
    size: int
    rows: tuple[int, ...] = field(compare=False)


@dataclass(frozen=True)
class Rows:
    """A tensor with one row per slot of a view."""

    view: View
    tensor: Tensor


class Slots:
    """Which slot each request holds. Admission takes the lowest free slot."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._slots: dict[Hashable, int] = {}
        self._clear: list[Callable[[int], None]] = []
        self._move: list[Callable[[int, int], None]] = []

    def on_admission(self, clear: Callable[[int], None]) -> None:
        """Call `clear` with each slot that is given to a request, so that nothing of its last user is left."""
        self._clear.append(clear)

    def on_move(self, move: Callable[[int, int], None]) -> None:
        """Call `move` with the old and the new slot of a request that moves."""
        self._move.append(move)

    @property
    def free(self) -> int:
        """Number of slots that no request holds."""
        return self.count - len(self._slots)

    def admit(self, request: Hashable) -> int:
        """Give `request` a slot. Raises RequestError if it has one, LimitError if none is free."""
        if request in self._slots:
            raise RequestError(f"request {request!r} already holds slot {self._slots[request]}")
        free = set(range(self.count)) - set(self._slots.values())
        if not free:
            raise LimitError(f"all {self.count} slots are taken: release a request, or finish or close the stream that holds one")
        slot = self._slots[request] = min(free)
        for clear in self._clear:
            clear(slot)
        return slot

    def release(self, request: Hashable) -> None:
        """Free the slot of `request`."""
        self.slot(request)
        del self._slots[request]

    def slot(self, request: Hashable) -> int:
        """Return the slot of `request`. Raises UnknownRequestError if it was never admitted, or was released."""
        try:
            return self._slots[request]
        except KeyError:
            raise UnknownRequestError(f"request {request!r} holds no slot: admit it first") from None

    def view(self, requests: Sequence[Hashable]) -> View:
        """Return the slot range of one call: the slot alone for one request, else the smallest bucket above the highest live slot."""
        slots = [self.slot(request) for request in requests]
        if len(set(slots)) != len(slots) or not slots:
            raise RequestError(f"requests {list(requests)!r}: expected at least one, each once")
        if len(slots) == 1:
            return View(slots[0], 1, (0,))
        return View(0, min(_bucket(max(self._slots.values()) + 1), self.count), tuple(slots))

    def straggler(self) -> Hashable | None:
        """Return the request in the highest slot, if views would be smaller without the free slots below it."""
        if len(self._slots) < 2:
            return None  # a single request's view is its slot alone
        request = max(self._slots, key=lambda r: self._slots[r])
        return request if _bucket(self._slots[request] + 1) > _bucket(len(self._slots)) else None

    def move_down(self, request: Hashable) -> None:
        """Move `request` to the lowest free slot, its rows and numbers with it."""
        old, new = self.slot(request), min(set(range(self.count)) - set(self._slots.values()))
        for move in self._move:
            move(old, new)
        self._slots[request] = new


def _bucket(slots: int) -> int:
    return 1 << (slots - 1).bit_length()


class State:
    """One tensor `[slots, heads, capacity, head_dim]` per layer and part; `kind` is `ring` or `cache`."""

    def __init__(self, engine: Engine, kind: str, config: TransformerConfig, slots: int, limit: int) -> None:
        most = engine.manifest.limits.max_batch_size
        if not 1 <= slots <= most:
            raise LimitError(f"{slots} slots, the bundle allows 1..{most} requests at once")
        self._engine, self._kind, self._limit = engine, kind, limit
        self._names = [name for name, _ in state_names(kind, config.num_hidden_layers)]
        self._most_slots, self._heads, self._head_dim = slots, config.num_key_value_heads, config.head_dim
        self.slots = self.capacity = 0
        self._tensors: dict[str, Tensor] = {}
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.bound: WeakSet[BoundStep] = WeakSet()
        if engine.fixed_capacity:
            self.reserve(slots, limit)
        else:
            self.reserve(1, 1)

    def bytes_at(self, slots: int, capacity: int) -> int:
        """Return the memory that the tensors take for a number of slots and rows."""
        itemsize = 4 if self._engine.manifest.dtype == "fp32" else 2
        return len(self._names) * slots * self._heads * capacity * self._head_dim * itemsize

    def reserve(self, slots: int, rows: int) -> None:
        """Make room for slots below `slots` and `rows` rows in each, or for the limit if that is less: rings wrap there."""
        if slots <= self.slots and (rows <= self.capacity or self.capacity == self._limit):
            return
        slots, capacity = min(self._most_slots, _bucket(max(slots, self.slots))), self.capacity
        if rows > capacity:
            step = max(GROWTH, capacity // 8)  # steps grow with the state, so that copying stays linear
            capacity = min(self._limit, round_up_16(max(rows, capacity + step)))
        needed, available = self.bytes_at(slots, capacity), self._engine.available_memory()
        if available is not None and needed > available:
            raise EngineError(
                f"the {self._kind}s need {needed / 1e9:.2f} GB for {capacity} rows in {slots} slots, {available / 1e9:.2f} GB are "
                "available: use fewer slots or shorter sequences"
            )
        logger.info("%ss: %d rows in %d slots, %.1f MB", self._kind, capacity, slots, needed / 1e6)
        shape = (slots, self._heads, capacity, self._head_dim)
        grown = {name: self._engine.allocate(shape, MODEL_DTYPE) for name in self._names}
        for name, old in self._tensors.items():
            grown[name].copy(old)
        self._tensors, self.slots, self.capacity = grown, slots, capacity
        self._views.clear()
        for step_bound in self.bound:
            step_bound.unbind()

    def move(self, old: int, new: int) -> None:
        """Copy the rows of a slot to a lower one."""
        if old >= self.slots:  # it has none yet
            self.clear(new)
            return
        for tensor in self._tensors.values():
            tensor.rows(new, 1).copy(tensor.rows(old, 1))

    def clear(self, slot: int) -> None:
        """Set the rows of a slot to zero: a hidden row has weight 0 in attention, but 0 times an infinity or NaN would show."""
        if slot < self.slots:
            for tensor in self._tensors.values():
                tensor.rows(slot, 1).write(0)

    def tensors(self, view: View) -> dict[str, Tensor]:
        """Return the rows of a slot range by input name."""
        key = view.lo, view.size
        self.reserve(view.lo + view.size, 1)
        if key not in self._views:
            self._views[key] = {name: tensor.rows(*key) for name, tensor in self._tensors.items()}
        return self._views[key]


class BoundStep:
    """A graph bound to small tensors of its own and to the state rows of a view; bound again when the state has grown."""

    def __init__(self, engine: Engine, graph: str, state: State, view: View, tensors: Mapping[str, Tensor]) -> None:
        self._engine, self._graph, self._state, self._view = engine, graph, state, view
        self.tensors = dict(tensors)
        self._step: Step | None = None
        state.bound.add(self)

    def run(self) -> None:
        """Run the graph."""
        if self._step is None:
            self._step = self._engine.bind(self._graph, {**self.tensors, **self._state.tensors(self._view)})
        self._step.run()

    def unbind(self) -> None:
        """Let go of the state's tensors, which have grown."""
        self._step = None
