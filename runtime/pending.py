"""Committed rows whose taps the drafter has not got: those of the last verification, and those kept aside while a request does not draft.

The taps of a verification stay in its tensor until the next draft reads them; the next verification takes their place. So rows of
requests that do not draft are kept in a buffer, and are written in one call when the request drafts again, or the buffer is full: a
round without a draft costs a plain step. Knows taps and numbers; not tokens. N rows of the verification, m tapped layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from dspark.runtime.drafter import Drafter
from dspark.runtime.engine import Array
from dspark.runtime.state import Rows, Slots

MOST_WAITING = 64
"""Rows of a request that wait before they are written in one call."""


class PendingRows:
    """What the rings lack, by request."""

    def __init__(self, slots: Slots, drafter: Drafter) -> None:
        self._slots, self._drafter = slots, drafter
        self._taps: Rows | None = None
        self._fresh: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, list[Array]] = {}
        self._stop: dict[Hashable, int] = {}

    @property
    def taps(self) -> Rows | None:
        """Taps of the last verification `[B,N,m*H]`, if rows of it are pending."""
        return self._taps if self._fresh else None

    def counts(self, requests: Sequence[Hashable]) -> list[int | None]:
        """Return how many rows of the last verification each request has pending; None for none."""
        return [self._fresh.get(request) for request in requests]

    def verified(self, taps: Rows) -> None:
        """Take the taps of a new verification; a draft has read those before, or `settle` has kept them."""
        self._taps = taps
        self._fresh.clear()

    def committed(self, request: Hashable, rows: int, stop: int) -> None:
        """Note that the first `rows` of the last verification are committed; the last of them has position `stop` - 1."""
        self._fresh[request], self._stop[request] = rows, stop

    def settle(self, drafting: Sequence[Hashable]) -> None:
        """Prepare a round: keep the rows of requests that do not draft in it, write what waits of those that do."""
        for request in [r for r in self._fresh if r not in drafting]:
            self.keep(request)
        for request in drafting:
            self.write(request)

    def keep(self, request: Hashable) -> None:
        """Copy the rows of the last verification aside, if the request has any."""
        count = self._fresh.pop(request, None)
        if count is None:
            return
        assert self._taps is not None
        row = self._slots.slot(request) - self._taps.view.lo
        waiting = self._waiting.setdefault(request, [])
        waiting.append(self._taps.tensor.rows(row, 1).read()[0, :count].copy())
        if sum(map(len, waiting)) >= MOST_WAITING:
            self.write(request)

    def write(self, request: Hashable) -> None:
        """Write what waits into the rings."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            stop = self._stop[request] - self._fresh.get(request, 0)
            taps = np.concatenate(waiting)
            self._drafter.write_context(request, taps, np.arange(stop - len(taps), stop))

    def forget(self, request: Hashable) -> None:
        """Drop everything of a request."""
        for kept in (self._fresh, self._waiting, self._stop):
            kept.pop(request, None)
