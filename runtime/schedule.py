"""The scheduler: who gets a slot, which part of a prompt is fed next, who takes part in a round and how wide it is.

Decides with plain numbers. Knows requests; not slots' rows, tensors or engines. K proposals a round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dspark.runtime.request import Request


@dataclass(frozen=True)
class Round:
    """The requests of a round, the rows to verify (1..K+1) and the proposals of each request that count (0..width-1)."""

    requests: Sequence[Request]
    width: int
    counts: Sequence[int]

    @classmethod
    def of(cls, requests: Sequence[Request], num_speculative_tokens: int) -> Round:
        """Let every request judge as many proposals as it may emit; no wider than the longest of them.

        What a request judges depends on its own numbers only, so that its sampled tokens do not depend on its neighbours.
        """
        counts = [min(num_speculative_tokens, request.left - 1) if request.speculative else 0 for request in requests]
        return cls(requests, 1 + max(counts), counts)


class Scheduler:
    """First come, first served: requests wait for a slot, then for their prompt to be fed, then take part in every round."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def admit(self, free: int) -> list[Request]:
        """Return the requests that get one of `free` slots now."""
        admitted = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        self.running += admitted
        return admitted

    def prefills(self) -> Iterator[tuple[Request, int]]:
        """Yield the prompts to feed in this step and how far: one chunk of tokens in all, so that no round waits for a long prompt."""
        budget = self._chunk
        for request in [r for r in self.running if not r.is_prefilled]:
            end = min(len(request.prompt), request.fed + budget)
            budget -= end - request.fed
            yield request, end
            if not budget:
                return

    def round(self, num_speculative_tokens: int) -> Round | None:
        """Return the next round: all requests that have their first token and go on; None if there are none."""
        ready = [request for request in self.running if request.is_prefilled and request.finish_reason is None]
        return Round.of(ready, num_speculative_tokens) if ready else None
